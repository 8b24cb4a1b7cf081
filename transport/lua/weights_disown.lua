#!lua flags=allow-oom
-- Chunks that no manifest names become garbage: in a store outside of Redis due at once, in Redis they expire.
-- One that is being published stays: outside it is in garbage already, in Redis its next put sets a later expiry.
-- KEYS: garbage, blob references
-- ARGV: prefix of chunk keys ("" if chunks are outside of Redis), how long they stay in Redis (ms), digests ...
-- Returns how many.
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
local count = 0
for i = 3, #ARGV do
  if redis.call('HEXISTS', KEYS[2], ARGV[i]) == 0 then
    if ARGV[1] == '' then
      count = count + redis.call('ZADD', KEYS[1], 'NX', now, ARGV[i])
    else
      count = count + redis.call('PEXPIRE', ARGV[1] .. ARGV[i], ARGV[2], 'LT')
    end
  end
end
return count
