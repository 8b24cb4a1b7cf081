#!lua flags=allow-oom
-- Remove what every group has acknowledged: all below the lowest of (oldest pending id | one past the last delivered).
-- ARGV: the learner's group, which must have read before anything may go; fate of what can never be delivered to it
-- Returns how many entries went.
local low_ms, low_seq, learner
for _, group in ipairs(all_groups()) do
  if group['name'] == ARGV[1] then
    learner = group
  end
  local ms, seq
  if group['pending'] > 0 then
    ms, seq = split(redis.call('XPENDING', STREAM, group['name'])[2])
  else
    ms, seq = split(group['last-delivered-id'])
    seq = seq + 1
  end
  if low_ms == nil or ms < low_ms or (ms == low_ms and seq < low_seq) then
    low_ms, low_seq = ms, seq
  end
end
if not learner then
  return 0
end
if redis.call('HLEN', OPEN_IDS) > learner['pending'] + undelivered(learner) then
  settle_lost(ARGV[2], learner)
end
return redis.call('XTRIM', STREAM, 'MINID', '=', string.format('%.0f-%.0f', low_ms, low_seq))
