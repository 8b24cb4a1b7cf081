-- End leases: the groups have arrived ('accepted'), or are to be handed out again ('returned').
-- KEYS: permits, leases, holders, returned
-- ARGV: 'accepted' or 'returned', index...
local next_new = tonumber(redis.call('HGET', KEYS[1], 'next') or '0')
for i = 2, #ARGV do
  redis.call('ZREM', KEYS[2], ARGV[i])
  redis.call('HDEL', KEYS[3], ARGV[i])
  if ARGV[1] == 'accepted' then
    redis.call('ZREM', KEYS[4], ARGV[i])
  elseif tonumber(ARGV[i]) < next_new then
    redis.call('ZADD', KEYS[4], ARGV[i], ARGV[i])
  end
end
return #ARGV - 1
