#!lua flags=allow-oom
-- Extend leases that the producer still holds.
-- KEYS: permits, leases, holders
-- ARGV: producer, lease ms, index...
-- Returns the indices that are no longer its own.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local expiry = string.format('%.0f', now + tonumber(ARGV[2]))
local lost, kept = {}, false
for i = 3, #ARGV do
  if redis.call('HGET', KEYS[3], ARGV[i]) == ARGV[1] then
    redis.call('ZADD', KEYS[2], expiry, ARGV[i])
    kept = true
  else
    lost[#lost + 1] = tonumber(ARGV[i])
  end
end
if kept and tonumber(redis.call('HGET', KEYS[1], 'longest_lease') or '0') < tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[1], 'longest_lease', ARGV[2])
end
return lost
