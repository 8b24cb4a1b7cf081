#!lua flags=allow-oom
-- End the fetch of a chunk into the cache, if it is still the caller's.
-- KEYS: who is fetching
-- ARGV: caller
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return 1
