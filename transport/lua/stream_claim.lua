-- Take over entries that OTHER consumers of the group have left idle. (XAUTOCLAIM would also hand a consumer its own:
-- a learner rightly holds entries for longer than that, until its checkpoint is durable.)
-- KEYS: stream, ledger
-- ARGV: group, consumer, idle ms, count, fate of an entry whose data somebody removed (empty: count nothing)
-- Returns {{id, {field, value, ...}, deliveries}, ...}.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {}
end
local wanted = tonumber(ARGV[4])
local found = {}
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local name = info[2]
  if name ~= ARGV[2] and #found < wanted then
    local pending = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', wanted - #found, name)
    for _, row in ipairs(pending) do
      local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], row[1])
      if claimed[1] and claimed[1][2] then
        found[#found + 1] = {claimed[1][1], claimed[1][2], row[4] + 1}
      elseif ARGV[5] ~= '' and #redis.call('XPENDING', KEYS[1], ARGV[1], row[1], row[1], 1) == 0 then
        redis.call('HINCRBY', KEYS[2], ARGV[5], 1)
      end
    end
  end
end
return found
