#!lua flags=allow-oom
-- A consumer's delivered and unacknowledged entries beyond an id, with how often each was delivered.
-- ARGV: group, consumer, count, after id, fate of an entry whose data somebody removed (empty: count nothing)
-- Returns {{id, {field, value, ...}, deliveries}, ...} and, second, the last id looked at.
local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', STREAM, ARGV[4])
local entries = reply and reply[1] and reply[1][2] or {}
if #entries == 0 then
  return {{}, ARGV[4]}
end
local deliveries = {}
local pending = redis.call('XPENDING', STREAM, ARGV[1], entries[1][1], entries[#entries][1], #entries, ARGV[2])
for _, row in ipairs(pending) do
  deliveries[row[1]] = row[4]
end
local found = {}
for _, entry in ipairs(entries) do
  if entry[2] then
    found[#found + 1] = {entry[1], entry[2], deliveries[entry[1]] or 1}
  elseif redis.call('XACK', STREAM, ARGV[1], entry[1]) == 1 then
    note_fate(entry[1], ARGV[5])
  end
end
return {found, entries[#entries][1]}
