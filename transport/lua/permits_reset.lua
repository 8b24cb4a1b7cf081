-- Open an epoch: what is accepted stays so, what is leased stays leased, every other index handed out is returned.
-- KEYS: permits, leases, holders, returned, takes
-- ARGV: epoch, version, batch, max age, total, limit, start, end, start, end, ...   (accepted: ascending, end exclusive)
-- Returns '' or the newer epoch that is open already.
local current = redis.call('HGET', KEYS[1], 'epoch')
if current and tonumber(current) > tonumber(ARGV[1]) then
  return current
end
local next_new = tonumber(redis.call('HGET', KEYS[1], 'next') or '0')
if #ARGV > 6 then
  next_new = math.max(next_new, tonumber(ARGV[#ARGV]))
end
redis.call('HSET', KEYS[1],
  'epoch', ARGV[1], 'version', ARGV[2], 'batch', ARGV[3], 'max_age', ARGV[4], 'total', ARGV[5], 'limit', ARGV[6],
  'next', string.format('%.0f', next_new))
redis.call('DEL', KEYS[4], KEYS[5])
local leased = {}
for _, index in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  leased[tonumber(index)] = true
end
local from = 0
for i = 7, #ARGV + 1, 2 do
  local start = tonumber(ARGV[i]) or next_new
  local stop = tonumber(ARGV[i + 1]) or next_new
  for number = from, start - 1 do
    if not leased[number] then
      local index = string.format('%.0f', number)
      redis.call('ZADD', KEYS[4], index, index)
    end
  end
  for number in pairs(leased) do
    if number >= start and number < stop then
      local index = string.format('%.0f', number)
      redis.call('ZREM', KEYS[2], index)
      redis.call('HDEL', KEYS[3], index)
    end
  end
  from = stop
end
return ''
