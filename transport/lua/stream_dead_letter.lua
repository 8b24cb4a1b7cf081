-- Move an entry to the dead letters: copy it with its cause, acknowledge it, count it. Once only.
-- KEYS: stream, ledger, dead letters
-- ARGV: group, id, cause, fate (empty: count nothing), fields copied at most
-- The copy comes first: it is the write that a full server refuses, and what is acknowledged is not delivered again.
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)
if pending.err then
  return string.find(pending.err, 'NOGROUP') and 0 or pending
end
if #pending == 0 then
  return 0
end
local letter = {'cause', ARGV[3], 'by', ARGV[1], 'id', ARGV[2]}
local entry = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])
local fields = entry[1] and entry[1][2] or {}
for i = 1, math.min(#fields, 2 * tonumber(ARGV[5])) do
  letter[#letter + 1] = fields[i]
end
redis.call('XADD', KEYS[3], '*', unpack(letter))
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
if ARGV[4] ~= '' then
  redis.call('HINCRBY', KEYS[2], ARGV[4], 1)
end
return 1
