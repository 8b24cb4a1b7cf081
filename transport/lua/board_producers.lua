#!lua flags=allow-oom
-- Producers that have reported lately, or those that have not, which are then forgotten.
-- KEYS: producers, seen
-- ARGV: ms, 'fresh' or 'drop'
-- Returns {producer, status, ...} of the fresh, or {producer, ...} of those dropped.
local time = redis.call('TIME')
local since = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) - tonumber(ARGV[1])
local reply = {}
if ARGV[2] == 'fresh' then
  for _, producer in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], since, '+inf')) do
    reply[#reply + 1] = producer
    reply[#reply + 1] = redis.call('HGET', KEYS[1], producer) or ''
  end
  return reply
end
for _, producer in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. string.format('%.0f', since))) do
  redis.call('ZREM', KEYS[2], producer)
  redis.call('HDEL', KEYS[1], producer)
  reply[#reply + 1] = producer
end
return reply
