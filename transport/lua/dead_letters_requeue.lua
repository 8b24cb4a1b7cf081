#!lua
-- Put a dead letter's entry back into the stream.
-- ARGV: id, how many fields of a letter are not the entry's, the learner's group, the fate to take back
-- Returns its new entry id, '' if there is no such letter, 'empty' if it holds no entry.
local page = redis.call('XRANGE', DEAD, ARGV[1], ARGV[1])
if #page == 0 then
  return ''
end
local letter = page[1][2]
local first = 2 * tonumber(ARGV[2]) + 1
if #letter < first then
  return 'empty'
end
local id = redis.call('XADD', STREAM, '*', unpack(letter, first))
redis.call('XDEL', DEAD, ARGV[1])
-- A letter begins with cause, by, id. What another group set aside went on to the learner, who gets it as one more entry.
if letter[4] ~= ARGV[3] then
  return id
end
count(ARGV[4], -1)
count('requeued', 1)
local entry = {}
for i = first, #letter, 2 do
  entry[letter[i]] = letter[i + 1]
end
local producer, seq = entry['producer'] or '', entry['seq'] or ''
if string.find(producer, '^[!-~]+$') and #producer <= 200 and string.find(seq, '^%d+$') and #seq <= 15 then
  note_open(id, producer, seq)
end
return id
