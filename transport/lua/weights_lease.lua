#!lua
-- Take or replace a lease on a version; leases long expired are cleared away.
-- KEYS: leases, expiries of leases
-- ARGV: holder, "epoch:version", how long from now (ms)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], string.format('%d', now_ms + tonumber(ARGV[3])), ARGV[1])
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%d', now_ms - 3600000), 'LIMIT', 0, 100)) do
  redis.call('ZREM', KEYS[2], holder)
  redis.call('HDEL', KEYS[1], holder)
end
return 1
