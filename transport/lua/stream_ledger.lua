#!lua flags=no-writes
-- The ledger as counted by appending and settling, and the pending entries as the stream itself counts them.
-- ARGV: group
-- Returns {pending, foreign, {field, count, ...}}.
local counted = redis.call('HGETALL', LEDGER)
local pending = redis.call('XLEN', STREAM)
for _, group in ipairs(all_groups()) do
  if group['name'] == ARGV[1] then
    pending = group['pending'] + undelivered(group)
  end
end
return {pending, foreign(named(counted)), counted}
