-- The ledger as counted by appending and settling, and the pending entries as the stream itself counts them.
-- KEYS: stream, ledger
-- ARGV: group
-- Returns {pending, {field, count, ...}}.
local counted = redis.call('HGETALL', KEYS[2])
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {0, counted}
end
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #info, 2 do
    group[info[i]] = info[i + 1]
  end
  if group['name'] == ARGV[1] then
    -- The server's lag is exact where it gives one (nobody deletes in mid-stream here); else count, a few at a time.
    local undelivered = group['lag']
    if type(undelivered) ~= 'number' then
      undelivered = 0
      local after = group['last-delivered-id']
      repeat
        local page = redis.call('XRANGE', KEYS[1], '(' .. after, '+', 'COUNT', 16)
        undelivered = undelivered + #page
        after = page[1] and page[#page][1]
      until #page == 0
    end
    return {group['pending'] + undelivered, counted}
  end
end
return {redis.call('XLEN', KEYS[1]), counted}
