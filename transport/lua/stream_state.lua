#!lua flags=no-writes
-- What the stream holds, and where its groups are.
-- Returns {entries, bytes, {group, undelivered, pending, idle ms or -1}, ...}.
local reply = {redis.call('XLEN', STREAM), redis.call('MEMORY', 'USAGE', STREAM) or 0}
for _, group in ipairs(all_groups()) do
  local idle = -1
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', STREAM, group['name'])) do
    local asked = named(consumer)['idle']
    idle = idle < 0 and asked or math.min(idle, asked)
  end
  reply[#reply + 1] = {group['name'], undelivered(group), group['pending'], idle}
end
return reply
