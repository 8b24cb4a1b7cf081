#!lua flags=allow-oom
-- Hand out again at once what an earlier process of this producer held.
-- KEYS: leases, holders, returned, takes
-- ARGV: producer, index to keep...
-- Returns how many.
local keep = {}
for i = 2, #ARGV do
  keep[ARGV[i]] = true
end
local handed_back = 0
local holders = redis.call('HGETALL', KEYS[2])
for i = 1, #holders, 2 do
  local index = holders[i]
  if holders[i + 1] == ARGV[1] and not keep[index] then
    redis.call('ZREM', KEYS[1], index)
    redis.call('HDEL', KEYS[2], index)
    redis.call('ZADD', KEYS[3], index, index)
    handed_back = handed_back + 1
  end
end
redis.call('HDEL', KEYS[4], ARGV[1])
return handed_back
