#!lua
-- Open an epoch: what is accepted or abandoned stays so, what is leased stays leased, every other index handed out is
-- returned.
-- KEYS: permits, leases, holders, returned, takes, attempts, abandoned
-- ARGV: epoch, version, batch, max age, total, limit, how many ranges, start, end, start, end, ... (accepted: ascending,
--       end exclusive), abandoned index...
-- Returns '' or the newer epoch that is open already.
local current = redis.call('HGET', KEYS[1], 'epoch')
if current and tonumber(current) > tonumber(ARGV[1]) then
  return current
end
local next_new = tonumber(redis.call('HGET', KEYS[1], 'next') or '0')
local last = 7 + 2 * tonumber(ARGV[7])
if last > 7 then
  next_new = math.max(next_new, tonumber(ARGV[last]))
end
for i = last + 1, #ARGV do
  next_new = math.max(next_new, tonumber(ARGV[i]) + 1)
end
redis.call('HSET', KEYS[1],
  'epoch', ARGV[1], 'version', ARGV[2], 'batch', ARGV[3], 'max_age', ARGV[4], 'total', ARGV[5], 'limit', ARGV[6],
  'next', string.format('%.0f', next_new))
redis.call('DEL', KEYS[4], KEYS[5])
local function forget(index)
  redis.call('ZREM', KEYS[2], index)
  redis.call('HDEL', KEYS[3], index)
  redis.call('HDEL', KEYS[6], index, index .. ':failed')
end
for i = last + 1, #ARGV do
  redis.call('ZADD', KEYS[7], ARGV[i], ARGV[i])
  forget(ARGV[i])
end
local out, tried = {}, {}  -- indices that are not to be returned; those with a count of attempts
for _, index in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  out[tonumber(index)] = true
end
for _, index in ipairs(redis.call('ZRANGE', KEYS[7], 0, -1)) do
  out[tonumber(index)] = true
end
for _, field in ipairs(redis.call('HKEYS', KEYS[6])) do
  tried[tonumber((string.gsub(field, ':failed', '')))] = true
end
local from = 0
for i = 8, last + 1, 2 do
  local start, stop = next_new, next_new
  if i < last then
    start, stop = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
  end
  for number = from, start - 1 do
    if not out[number] then
      local index = string.format('%.0f', number)
      redis.call('ZADD', KEYS[4], index, index)
    end
  end
  for _, known in ipairs({out, tried}) do
    for number in pairs(known) do
      if number >= start and number < stop then
        forget(string.format('%.0f', number))
      end
    end
  end
  from = stop
end
return ''
