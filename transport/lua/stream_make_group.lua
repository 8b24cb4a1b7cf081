#!lua flags=allow-oom
-- Make a consumer group that is missing, from the beginning of the stream: what comes twice is found by its (producer,
-- seq), what is skipped is gone. Allowed on a full server: only who reads can make room.
-- ARGV: group, fate of an entry that is lost (of the learner's group; else empty)
-- Returns 1, or 0 if another consumer was faster.
for _, group in ipairs(all_groups()) do
  if group['name'] == ARGV[1] then
    return 0
  end
end
redis.call('XGROUP', 'CREATE', STREAM, ARGV[1], '0', 'MKSTREAM')
if ARGV[2] == '' or redis.call('HINCRBY', LEDGER, 'grouped', 1) == 1 then
  return 1
end
-- Somebody destroyed the learner's group: entries that it had settled and that are still there are delivered, and will be
-- counted, a second time.
settle_lost(ARGV[2])
local counted = named(redis.call('HGETALL', LEDGER))
local owed = (counted['produced'] or 0) + foreign(counted)
for name, number in pairs(counted) do
  if name == 'trained' or string.sub(name, 1, 8) == 'dropped:' then
    owed = owed - number
  end
end
local again = redis.call('XLEN', STREAM) - owed
if again > 0 then
  count('again', again)
end
return 1
