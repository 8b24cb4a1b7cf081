#!lua
-- Lease the lowest evaluation shard that has neither result nor living lease.
-- KEYS: evaluation, results
-- ARGV: epoch, version, producer, lease ms
-- A field of `results` is a JSON object (a result) or "expiry|producer" (a lease). Returns the shard, or -1.
local text = redis.call('GET', KEYS[1])
if not text then
  return -1
end
local wanted = cjson.decode(text)
if wanted.epoch ~= tonumber(ARGV[1]) or wanted.version ~= tonumber(ARGV[2]) then
  return -1
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
for shard = 0, wanted.shards - 1 do
  local value = redis.call('HGET', KEYS[2], shard)
  local expiry = value and tonumber(string.match(value, '^(%d+)|'))
  -- Later than two leases from now: it was written before the clock stepped back.
  if not value or (expiry and (expiry <= now or expiry > now + 2 * tonumber(ARGV[4]))) then
    redis.call('HSET', KEYS[2], shard, string.format('%.0f', now + tonumber(ARGV[4])) .. '|' .. ARGV[3])
    return shard
  end
end
return -1
