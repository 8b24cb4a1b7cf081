-- Store an entry once.
-- KEYS: stream, seen (hash: producer -> highest sequence number), ledger (hash)
-- ARGV: producer, seq, field, value, field, value, ...
-- Returns 1 if stored, 0 if (producer, seq) was stored before.
local last = redis.call('HGET', KEYS[2], ARGV[1])
if last and tonumber(ARGV[2]) <= tonumber(last) then
  return 0
end
redis.call('XADD', KEYS[1], '*', unpack(ARGV, 3))
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[3], 'produced', 1)
return 1
