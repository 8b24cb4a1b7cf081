#!lua flags=allow-oom
-- Claim chunks that are due for deletion from a store outside of Redis and that no manifest names.
-- KEYS: garbage, blob references
-- ARGV: how many at most, how long an earlier claim counts (ms)
-- Returns their digests; whoever claims them deletes them and calls weights_forget_garbage.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local lapsed = string.format('(-%d', now_ms - tonumber(ARGV[2]))
local claimed = {}
for _, digest in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], lapsed, string.format('%d', now_ms), 'LIMIT', 0, ARGV[1])) do
  if redis.call('HEXISTS', KEYS[2], digest) == 1 then
    redis.call('ZREM', KEYS[1], digest)
  else
    redis.call('ZADD', KEYS[1], string.format('-%d', now_ms), digest)
    claimed[#claimed + 1] = digest
  end
end
return claimed
