#!lua flags=allow-oom
-- Move an entry to the dead letters: copy it with its cause, settle it. Once only.
-- ARGV: group, id, cause, fate (empty: count nothing), fields copied at most, letters kept at most
-- A full server takes the copy too: the entry itself can go then, and what nobody can read must not stay for ever.
local pending = redis.pcall('XPENDING', STREAM, ARGV[1], ARGV[2], ARGV[2], 1)
if pending.err then
  return string.find(pending.err, 'NOGROUP') and 0 or pending
end
if #pending == 0 then
  return 0
end
try_books(ARGV[4])
local letter = {'cause', ARGV[3], 'by', ARGV[1], 'id', ARGV[2]}
local entry = redis.call('XRANGE', STREAM, ARGV[2], ARGV[2])
local fields = entry[1] and entry[1][2] or {}
for i = 1, math.min(#fields, 2 * tonumber(ARGV[5])) do
  letter[#letter + 1] = fields[i]
end
redis.call('XADD', DEAD, '*', unpack(letter))
redis.call('XACK', STREAM, ARGV[1], ARGV[2])
note_fate(ARGV[2], ARGV[4])
local gone = redis.call('XTRIM', DEAD, 'MAXLEN', '=', ARGV[6])
if gone > 0 then
  count('made_room', gone)
end
return 1
