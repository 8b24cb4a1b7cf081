-- Acknowledge entries and count their fates; an entry acknowledged before is not counted again.
-- KEYS: stream, ledger
-- ARGV: group, id, fate, id, fate, ...   (an empty fate counts nothing)
-- Returns how many were newly acknowledged.
local settled = 0
for i = 2, #ARGV, 2 do
  if redis.call('XACK', KEYS[1], ARGV[1], ARGV[i]) == 1 then
    settled = settled + 1
    if ARGV[i + 1] ~= '' then
      redis.call('HINCRBY', KEYS[2], ARGV[i + 1], 1)
    end
  end
end
return settled
