-- Open the next epoch of a run, above every one opened or published before and above what the caller knows of.
-- KEYS: epoch, head
-- ARGV: an epoch to stay above
-- Returns the new epoch.
local head = redis.call('GET', KEYS[2])
local published = head and cjson.decode(head).epoch or 0
local newest = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1]), published)
redis.call('SET', KEYS[1], string.format('%d', newest + 1))
return newest + 1
