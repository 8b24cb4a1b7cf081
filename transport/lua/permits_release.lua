#!lua flags=allow-oom
-- End leases: the groups have arrived ('accepted'), or are to be handed out again ('returned').
-- KEYS: permits, leases, holders, returned, attempts, abandoned
-- ARGV: 'accepted' or 'returned', index or index:attempt... (a later attempt that is on a lease goes on)
local next_new, limit = unpack(redis.call('HMGET', KEYS[1], 'next', 'limit'))
next_new, limit = tonumber(next_new or '0'), tonumber(limit or '0') + redis.call('ZCARD', KEYS[6])
local first_new = next_new
for i = 2, #ARGV do
  local index, attempt = string.match(ARGV[i], '^(%d+):?(%d*)$')
  local number = tonumber(index)
  local later = attempt ~= '' and tonumber(redis.call('HGET', KEYS[5], index) or '0') > tonumber(attempt)
    and redis.call('ZSCORE', KEYS[2], index)
  if not later then
    redis.call('ZREM', KEYS[2], index)
    redis.call('HDEL', KEYS[3], index)
  end
  if ARGV[1] == 'accepted' then
    redis.call('ZREM', KEYS[4], index)
    redis.call('HDEL', KEYS[5], index, index .. ':failed')
    -- It was handed out and the hub has forgotten that (it lost its last second): so were those below it.
    while next_new <= number and number < limit do
      if next_new < number and not redis.call('ZSCORE', KEYS[6], string.format('%.0f', next_new)) then
        redis.call('ZADD', KEYS[4], next_new, string.format('%.0f', next_new))
      end
      next_new = next_new + 1
    end
  elseif not later and number < next_new and not redis.call('ZSCORE', KEYS[6], index) then
    redis.call('ZADD', KEYS[4], index, index)
  end
end
if next_new > first_new then
  redis.call('HSET', KEYS[1], 'next', string.format('%.0f', next_new))
end
return #ARGV - 1
