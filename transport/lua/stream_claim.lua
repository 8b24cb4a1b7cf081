#!lua flags=allow-oom
-- Take over entries that OTHER consumers of the group have left idle. (XAUTOCLAIM would also hand a consumer its own:
-- a learner rightly holds entries for longer than that, until its checkpoint is durable.)
-- ARGV: group, consumer, idle ms, count, fate of an entry whose data somebody removed (empty: count nothing)
-- Returns {{id, {field, value, ...}, deliveries}, ...}.
if redis.call('EXISTS', STREAM) == 0 then
  return {}
end
local wanted = tonumber(ARGV[4])
local found = {}
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', STREAM, ARGV[1])) do
  local name = info[2]
  if name ~= ARGV[2] and #found < wanted then
    local pending = redis.call('XPENDING', STREAM, ARGV[1], 'IDLE', ARGV[3], '-', '+', wanted - #found, name)
    for _, row in ipairs(pending) do
      local claimed = redis.call('XCLAIM', STREAM, ARGV[1], ARGV[2], ARGV[3], row[1])
      if claimed[1] and claimed[1][2] then
        found[#found + 1] = {claimed[1][1], claimed[1][2], row[4] + 1}
      elseif #redis.call('XPENDING', STREAM, ARGV[1], row[1], row[1], 1) == 0 then
        note_fate(row[1], ARGV[5])
      end
    end
  end
end
return found
