#!lua flags=allow-oom
-- A version is published: raise the limit to min((max age + version + 1) * batch, total), never lower it. Abandoned
-- indices that the learner knows of and the hub has forgotten are abandoned again.
-- KEYS: permits, leases, holders, returned, attempts, abandoned
-- ARGV: version, its epoch ('': of the one that is open), abandoned index...
-- Returns the epoch that is open, 0 if none is; of another one nothing is raised.
local epoch, version, batch, max_age, total, limit, next_new =
  unpack(redis.call('HMGET', KEYS[1], 'epoch', 'version', 'batch', 'max_age', 'total', 'limit', 'next'))
if not version then
  return 0
end
epoch, next_new = tonumber(epoch), tonumber(next_new)
if ARGV[2] ~= '' and epoch ~= tonumber(ARGV[2]) then
  return epoch
end
for i = 3, #ARGV do
  local index = ARGV[i]
  while next_new <= tonumber(index) do  -- the hub has forgotten that it handed them out
    redis.call('ZADD', KEYS[4], next_new, string.format('%.0f', next_new))
    next_new = next_new + 1
  end
  redis.call('ZADD', KEYS[6], index, index)
  redis.call('ZREM', KEYS[2], index)
  redis.call('HDEL', KEYS[3], index)
  redis.call('ZREM', KEYS[4], index)
  redis.call('HDEL', KEYS[5], index, index .. ':failed')
end
local newest = math.max(tonumber(version), tonumber(ARGV[1]))
local allowed = math.min((tonumber(max_age) + newest + 1) * tonumber(batch), tonumber(total))
redis.call('HSET', KEYS[1],
  'version', string.format('%.0f', newest), 'next', string.format('%.0f', next_new),
  'limit', string.format('%.0f', math.max(allowed, tonumber(limit))))
return epoch
