-- A version is published: raise the limit to min((max age + version + 1) * batch, total), never lower it.
-- KEYS: permits
-- ARGV: version, its epoch ('': of the one that is open)
-- Returns the epoch that is open, 0 if none is; of a newer one nothing is raised.
local epoch, version, batch, max_age, total, limit =
  unpack(redis.call('HMGET', KEYS[1], 'epoch', 'version', 'batch', 'max_age', 'total', 'limit'))
if not version then
  return 0
end
epoch = tonumber(epoch)
if ARGV[2] ~= '' and epoch > tonumber(ARGV[2]) then
  return epoch
end
local newest = math.max(tonumber(version), tonumber(ARGV[1]))
local allowed = math.min((tonumber(max_age) + newest + 1) * tonumber(batch), tonumber(total))
redis.call('HSET', KEYS[1],
  'version', string.format('%.0f', newest),
  'limit', string.format('%.0f', math.max(allowed, tonumber(limit))))
return epoch
