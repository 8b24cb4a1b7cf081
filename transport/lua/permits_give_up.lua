#!lua flags=allow-oom
-- A producer could not finish groups: hand them out again at once, or abandon those that have failed too often.
-- KEYS: leases, holders, returned, attempts, abandoned
-- ARGV: producer, failures after which an index is abandoned (0: not the group's fault, nothing is counted), index...
-- Returns those of the indices that are abandoned.
local gone = {}
for i = 3, #ARGV do
  local index = ARGV[i]
  if redis.call('HGET', KEYS[2], index) == ARGV[1] then
    redis.call('ZREM', KEYS[1], index)
    redis.call('HDEL', KEYS[2], index)
    local most = tonumber(ARGV[2])
    if most > 0 and redis.call('HINCRBY', KEYS[4], index .. ':failed', 1) >= most then
      redis.call('ZADD', KEYS[5], index, index)
      redis.call('HDEL', KEYS[4], index, index .. ':failed')
    else
      redis.call('ZADD', KEYS[3], index, index)
    end
  end
  if redis.call('ZSCORE', KEYS[5], index) then
    gone[#gone + 1] = tonumber(index)
  end
end
return gone
