#!lua flags=allow-oom
-- Chunks that were claimed are deleted; forget those that nobody has announced again since.
-- KEYS: garbage
-- ARGV: digest...
for _, digest in ipairs(ARGV) do
  if tonumber(redis.call('ZSCORE', KEYS[1], digest) or '1') < 0 then
    redis.call('ZREM', KEYS[1], digest)
  end
end
return #ARGV
