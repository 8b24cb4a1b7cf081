-- Drop manifests, and the chunks that no manifest names any more.
-- KEYS: versions, blob references
-- ARGV: prefix of manifest keys, prefix of blob keys, member of `versions`...
-- Returns how many manifests went.
local gone = 0
for i = 3, #ARGV do
  local key = ARGV[1] .. ARGV[i]
  local text = redis.call('GET', key)
  if text then
    local released = {}
    for _, chunk in ipairs(cjson.decode(text).chunks) do
      if not released[chunk.digest] and redis.call('HINCRBY', KEYS[2], chunk.digest, -1) <= 0 then
        redis.call('HDEL', KEYS[2], chunk.digest)
        redis.call('UNLINK', ARGV[2] .. chunk.digest)
      end
      released[chunk.digest] = true
    end
    redis.call('DEL', key)
    gone = gone + 1
  end
  redis.call('ZREM', KEYS[1], ARGV[i])
end
return gone
