#!lua flags=allow-oom
-- Acknowledge entries and count their fates; an entry acknowledged before is not counted again.
-- ARGV: group, id, fate, id, fate, ...   (an empty fate: of a group that is not the learner's)
-- Returns how many were newly acknowledged.
local settled, tried = 0, {}
for i = 3, #ARGV, 2 do
  if not tried[ARGV[i]] then
    try_books(ARGV[i])
    tried[ARGV[i]] = true
  end
end
for i = 2, #ARGV, 2 do
  if redis.call('XACK', STREAM, ARGV[1], ARGV[i]) == 1 then
    settled = settled + 1
    note_fate(ARGV[i], ARGV[i + 1])
  end
end
return settled
