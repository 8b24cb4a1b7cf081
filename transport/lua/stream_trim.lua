#!lua flags=allow-oom
-- Remove what every group has acknowledged: all below the lowest of (oldest pending id | one past the last delivered).
-- ARGV: group that must have read before anything may go
-- Returns how many entries went.
local function split(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local low_ms, low_seq, required = nil, nil, false
for _, group in ipairs(all_groups()) do
  required = required or group['name'] == ARGV[1]
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
if not required then
  return 0
end
return redis.call('XTRIM', STREAM, 'MINID', '=', string.format('%.0f-%.0f', low_ms, low_seq))
