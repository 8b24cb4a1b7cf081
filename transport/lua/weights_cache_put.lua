#!lua
-- Keep a chunk in the region's cache, and drop those least lately used until all fit the budget.
-- KEYS: chunk, use times, sizes
-- ARGV: digest, chunk, budget in bytes, prefix of chunk keys
-- Returns how many were dropped, -1 if the chunk alone is over the budget.
local digest, size, budget = ARGV[1], #ARGV[2], tonumber(ARGV[3])
if size > budget then
  return -1
end
local time = redis.call('TIME')
local now_ms = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
local total = tonumber(redis.call('HGET', KEYS[3], 'total') or '0')
total = total - tonumber(redis.call('HGET', KEYS[3], digest) or '0')
redis.call('ZREM', KEYS[2], digest)
redis.call('HDEL', KEYS[3], digest)
local dropped = 0
while total + size > budget do
  local oldest = redis.call('ZPOPMIN', KEYS[2])
  if #oldest == 0 then
    total = 0 -- the sizes were of chunks that are gone
    redis.call('DEL', KEYS[3])
    break
  end
  redis.call('UNLINK', ARGV[4] .. oldest[1])
  total = total - tonumber(redis.call('HGET', KEYS[3], oldest[1]) or '0')
  redis.call('HDEL', KEYS[3], oldest[1])
  dropped = dropped + 1
end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], now_ms, digest)
redis.call('HSET', KEYS[3], digest, string.format('%d', size), 'total', string.format('%d', total + size))
return dropped
