#!lua
-- Store an entry if it is the next of its producer.
-- ARGV: producer, lowest sequence number that the producer still holds, sequence number, field, value, field, value, ...
-- Returns the sequence number that is expected next.
local last = tonumber(redis.call('HGET', SEEN, ARGV[1]) or '-1')
local expected = math.max(last + 1, tonumber(ARGV[2]))
if tonumber(ARGV[3]) ~= expected then
  return expected
end
local id = redis.call('XADD', STREAM, '*', unpack(ARGV, 4))
redis.call('HSET', SEEN, ARGV[1], ARGV[3])
note_open(id, ARGV[1], ARGV[3])
count('produced', 1)
return expected + 1
