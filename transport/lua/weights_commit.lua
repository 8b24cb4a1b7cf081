-- Store a manifest and move the head to it, or refuse.
-- KEYS: head, opened epoch, versions, blob references, manifest, layout, blob...
-- ARGV: epoch, version, kind, manifest JSON, score in `versions`, digest...
-- Returns 'ok', or a refusal: {'stale', epoch, version} {'fenced', epoch} {'differs'} {'missing', what}
local epoch, version = tonumber(ARGV[1]), tonumber(ARGV[2])
local opened = tonumber(redis.call('GET', KEYS[2]) or '0')
if opened > epoch then
  return {'fenced', tostring(opened)}
end
local head = redis.call('GET', KEYS[1])
if head then
  local now = cjson.decode(head)
  if now.epoch > epoch or (now.epoch == epoch and now.version > version) then
    return {'stale', tostring(now.epoch), tostring(now.version)}
  end
end
local existing = redis.call('GET', KEYS[5])
if existing then
  return existing == ARGV[4] and {'ok'} or {'differs'}
end
if redis.call('EXISTS', KEYS[6]) == 0 then
  return {'missing', 'its layout'}
end
for i = 7, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    return {'missing', 'chunk ' .. ARGV[i - 1]}
  end
end
redis.call('SET', KEYS[5], ARGV[4])
for i = 7, #KEYS do
  redis.call('PERSIST', KEYS[i])
  redis.call('HINCRBY', KEYS[4], ARGV[i - 1], 1)
end
redis.call('ZADD', KEYS[3], ARGV[5], ARGV[1] .. ':' .. ARGV[2] .. ':' .. ARGV[3])
redis.call('SET', KEYS[1], cjson.encode({epoch = epoch, version = version}))
return {'ok'}
