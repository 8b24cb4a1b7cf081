-- A version is published: raise the limit to min((max age + version + 1) * batch, total), never lower it.
-- KEYS: permits
-- ARGV: version
-- Returns 1, or 0 when no epoch is open.
local version, batch, max_age, total, limit =
  unpack(redis.call('HMGET', KEYS[1], 'version', 'batch', 'max_age', 'total', 'limit'))
if not version then
  return 0
end
local newest = math.max(tonumber(version), tonumber(ARGV[1]))
local allowed = math.min((tonumber(max_age) + newest + 1) * tonumber(batch), tonumber(total))
redis.call('HSET', KEYS[1],
  'version', string.format('%.0f', newest),
  'limit', string.format('%.0f', math.max(allowed, tonumber(limit))))
return 1
