#!lua flags=allow-oom
-- Extend the lease of an evaluation shard.
-- KEYS: results
-- ARGV: producer, shard, lease ms
-- Returns 1, or 0 if the lease is not the producer's (any more) or the shard has a result.
local value = redis.call('HGET', KEYS[1], ARGV[2])
if not value or string.match(value, '^%d+|(.*)$') ~= ARGV[1] then
  return 0
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('HSET', KEYS[1], ARGV[2], string.format('%.0f', now + tonumber(ARGV[3])) .. '|' .. ARGV[1])
return 1
