-- Extend leases that the producer still holds.
-- KEYS: leases, holders
-- ARGV: producer, lease ms, index...
-- Returns the indices that are no longer its own.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local expiry = string.format('%.0f', now + tonumber(ARGV[2]))
local lost = {}
for i = 3, #ARGV do
  if redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[1] then
    redis.call('ZADD', KEYS[1], expiry, ARGV[i])
  else
    lost[#lost + 1] = tonumber(ARGV[i])
  end
end
return lost
