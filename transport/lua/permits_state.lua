#!lua flags=no-writes
-- What a person asks about permits.
-- KEYS: permits, leases, holders, returned, abandoned
-- Returns {epoch or '', version, next, limit without what abandoned indices add, returned, expired,
--          producer, leases that run, producer, leases, ...}.
local epoch, version, next_new, limit, longest =
  unpack(redis.call('HMGET', KEYS[1], 'epoch', 'version', 'next', 'limit', 'longest_lease'))
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local latest = now + 2 * tonumber(longest or '0')
local expired, running = 0, {}
local leases = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local expiry = tonumber(leases[i + 1])
  if expiry <= now or expiry > latest then
    expired = expired + 1
  else
    local producer = redis.call('HGET', KEYS[3], leases[i]) or ''
    running[producer] = (running[producer] or 0) + 1
  end
end
local reply = {epoch or '', tonumber(version or '0'), tonumber(next_new or '0'), tonumber(limit or '0'),
  redis.call('ZCARD', KEYS[4]), expired}
for producer, count in pairs(running) do
  reply[#reply + 1] = producer
  reply[#reply + 1] = count
end
return reply
