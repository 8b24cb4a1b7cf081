-- Move an entry to the dead letters: copy it with its cause, acknowledge it, count it. Once only.
-- KEYS: stream, ledger, dead letters
-- ARGV: group, id, cause, fate (empty: count nothing)
local entry = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then
  return 0
end
local fields = entry[1] and entry[1][2] or {}
redis.call('XADD', KEYS[3], '*', 'cause', ARGV[3], 'by', ARGV[1], 'id', ARGV[2], unpack(fields))
if ARGV[4] ~= '' then
  redis.call('HINCRBY', KEYS[2], ARGV[4], 1)
end
return 1
