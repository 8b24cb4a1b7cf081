#!lua
-- Put a chunk that is there already: it may have been damaged, and whoever names it may be dropped before we name it.
-- KEYS: chunk, garbage
-- ARGV: digest, chunk, how long it may stay uncommitted (ms)
-- Returns 1, or 0 if it is not there any more.
if not redis.call('SET', KEYS[1], ARGV[2], 'XX', 'KEEPTTL') then
  return 0
end
if redis.call('PEXPIRE', KEYS[1], ARGV[3], 'XX') == 0 then
  -- A manifest names it, so it has no expiry: weights_drop gives it this one in place of deleting it.
  local time = redis.call('TIME')
  local due_ms = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[3])
  redis.call('ZADD', KEYS[2], string.format('%d', due_ms), ARGV[1])
end
return 1
