#!lua
-- Hand out group indices on a lease: expired and returned ones first, lowest first, then new ones, below the limit.
-- KEYS: permits, leases, holders, returned, attempts, takes, abandoned
-- ARGV: producer, at most, lease ms, nonce of the call (a call that is repeated gets what it got)
-- Returns {} while no epoch is open, else {epoch, version, batch, max age, index, attempt, abandoned below it, ...}.
local epoch, version, batch, max_age, limit, next_new, longest =
  unpack(redis.call('HMGET', KEYS[1], 'epoch', 'version', 'batch', 'max_age', 'limit', 'next', 'longest_lease'))
if not epoch then
  return {}
end
local function abandoned_below(number)
  return redis.call('ZCOUNT', KEYS[7], '-inf', string.format('(%.0f', number))
end
local function below_limit(bound)  -- each abandoned index makes room for another one
  local raised = bound + abandoned_below(bound)
  while raised < bound + abandoned_below(raised) do
    raised = bound + abandoned_below(raised)
  end
  return raised
end
limit, next_new = below_limit(tonumber(limit)), tonumber(next_new)
local reply = {tonumber(epoch), tonumber(version), tonumber(batch), tonumber(max_age)}
local function grant(index, attempt)
  reply[#reply + 1] = tonumber(index)
  reply[#reply + 1] = attempt
  reply[#reply + 1] = abandoned_below(tonumber(index))
end

local nonce
for word in string.gmatch(redis.call('HGET', KEYS[6], ARGV[1]) or '', '%S+') do
  if not nonce then
    nonce = word
  elseif nonce == ARGV[4] and redis.call('HGET', KEYS[3], word) == ARGV[1] then
    grant(word, tonumber(redis.call('HGET', KEYS[5], word) or '0'))
  end
end
if nonce == ARGV[4] then
  return reply
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local expiry = string.format('%.0f', now + tonumber(ARGV[3]))
local at_most = tonumber(ARGV[2])
longest = math.max(tonumber(longest or '0'), tonumber(ARGV[3]))
local again = {}
local function collect(indices)
  for _, index in ipairs(indices) do
    again[#again + 1] = tonumber(index)
  end
end
collect(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now))
collect(redis.call('ZRANGEBYSCORE', KEYS[2], string.format('(%.0f', now + 2 * longest), '+inf'))  -- the clock went back
collect(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', string.format('(%.0f', limit), 'LIMIT', 0, at_most))
table.sort(again)
local taken = {}
local function lease(index, attempt)
  redis.call('ZADD', KEYS[2], expiry, index)
  redis.call('HSET', KEYS[3], index, ARGV[1])
  taken[#taken + 1] = index
  grant(index, attempt)
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
  redis.call('HSET', KEYS[1],
    'next', string.format('%.0f', next_new), 'longest_lease', string.format('%.0f', longest))
  redis.call('HSET', KEYS[6], ARGV[1], ARGV[4] .. ' ' .. table.concat(taken, ' '))
  if redis.call('HLEN', KEYS[6]) > redis.call('HLEN', KEYS[3]) + 64 then  -- producers that are gone leave theirs behind
    local holding = {}
    for _, producer in ipairs(redis.call('HVALS', KEYS[3])) do
      holding[producer] = true
    end
    for _, producer in ipairs(redis.call('HKEYS', KEYS[6])) do
      if not holding[producer] then
        redis.call('HDEL', KEYS[6], producer)
      end
    end
  end
end
return reply
