-- Hand out group indices on a lease: expired and returned ones first, lowest first, then new ones, below the limit.
-- KEYS: permits, leases, holders, returned, attempts, takes
-- ARGV: producer, at most, lease ms, nonce of the call (a call that is repeated gets what it got)
-- Returns {} while no epoch is open, else {epoch, version, batch, max age, index, attempt, index, attempt, ...}.
local epoch, version, batch, max_age, limit, next_new =
  unpack(redis.call('HMGET', KEYS[1], 'epoch', 'version', 'batch', 'max_age', 'limit', 'next'))
if not epoch then
  return {}
end
limit, next_new = tonumber(limit), tonumber(next_new)
local reply = {tonumber(epoch), tonumber(version), tonumber(batch), tonumber(max_age)}

local nonce
for word in string.gmatch(redis.call('HGET', KEYS[6], ARGV[1]) or '', '%S+') do
  if not nonce then
    nonce = word
  elseif nonce == ARGV[4] and redis.call('HGET', KEYS[3], word) == ARGV[1] then
    reply[#reply + 1] = tonumber(word)
    reply[#reply + 1] = tonumber(redis.call('HGET', KEYS[5], word) or '0')
  end
end
if nonce == ARGV[4] then
  return reply
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local expiry = string.format('%.0f', now + tonumber(ARGV[3]))
local at_most = tonumber(ARGV[2])
local again = {}
for _, index in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  again[#again + 1] = tonumber(index)
end
for _, index in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', '(' .. limit, 'LIMIT', 0, at_most)) do
  again[#again + 1] = tonumber(index)
end
table.sort(again)
local taken = {}
local function lease(index, attempt)
  redis.call('ZADD', KEYS[2], expiry, index)
  redis.call('HSET', KEYS[3], index, ARGV[1])
  taken[#taken + 1] = index
  reply[#reply + 1] = tonumber(index)
  reply[#reply + 1] = attempt
end
for _, number in ipairs(again) do
  if #taken < at_most and number < limit then
    local index = string.format('%.0f', number)
    redis.call('ZREM', KEYS[4], index)
    lease(index, redis.call('HINCRBY', KEYS[5], index, 1))
  end
end
while #taken < at_most and next_new < limit do
  lease(string.format('%.0f', next_new), 0)
  next_new = next_new + 1
end
if #taken > 0 then
  redis.call('HSET', KEYS[1], 'next', string.format('%.0f', next_new))
  redis.call('HSET', KEYS[6], ARGV[1], ARGV[4] .. ' ' .. table.concat(taken, ' '))
end
return reply
