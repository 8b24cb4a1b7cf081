#!lua
-- Leave an evaluation shard's result, unless it has one or the policy is not wanted (any more).
-- KEYS: evaluation, results
-- ARGV: epoch, version, shard, result JSON
-- Returns 1 if stored.
local text = redis.call('GET', KEYS[1])
if not text then
  return 0
end
local wanted = cjson.decode(text)
local shard = tonumber(ARGV[3])
if wanted.epoch ~= tonumber(ARGV[1]) or wanted.version ~= tonumber(ARGV[2]) or shard < 0 or shard >= wanted.shards then
  return 0
end
if string.sub(redis.call('HGET', KEYS[2], ARGV[3]) or '', 1, 1) == '{' then
  return 0
end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
return 1
