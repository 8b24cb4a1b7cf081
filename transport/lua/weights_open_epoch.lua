-- Open the next epoch of a run, above every one opened before and above what the caller knows of.
-- KEYS: epoch
-- ARGV: an epoch to stay above
-- Returns the new epoch.
local newest = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%d', newest + 1))
return newest + 1
