#!lua
-- A chunk is about to be put into a store outside of Redis: keep collectors away from it until it is committed.
-- KEYS: garbage
-- ARGV: digest, how long it may stay uncommitted (ms), how long a collector's claim counts (ms)
-- Returns 1, or 0 while a collector is deleting that chunk (score in garbage: when it is due; minus the time of the
-- claim while it is being deleted).
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local score = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or '0')
if score < 0 and now_ms + score < tonumber(ARGV[3]) then
  return 0
end
redis.call('ZADD', KEYS[1], string.format('%d', now_ms + tonumber(ARGV[2])), ARGV[1])
return 1
