#!lua flags=no-writes
-- Dead letters beyond an id, oldest first, one at a time: a letter may be large.
-- ARGV: after id, at most, bytes of a value that are shown (0: all)
-- Returns {{id, {field, value, ...}, bytes of all names and values}, ...}.
local found, after, shown = {}, ARGV[1], tonumber(ARGV[3])
while #found < tonumber(ARGV[2]) do
  local page = redis.call('XRANGE', DEAD, '(' .. after, '+', 'COUNT', 1)
  if #page == 0 then
    break
  end
  local fields, bytes = page[1][2], 0
  for i = 1, #fields do
    bytes = bytes + #fields[i]
    if shown > 0 then
      fields[i] = string.sub(fields[i], 1, shown)
    end
  end
  after = page[1][1]
  found[#found + 1] = {after, fields, bytes}
end
return found
