#!lua
-- Pin a version while the entries that lead to it are still there.
-- KEYS: pins, index
-- ARGV: "epoch:version", note, member of the index...
-- Returns 1, or 0 if one of them has gone meanwhile.
for i = 3, #ARGV do
  if not redis.call('ZSCORE', KEYS[2], ARGV[i]) then
    return 0
  end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
