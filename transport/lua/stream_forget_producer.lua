#!lua flags=allow-oom
-- Forget a producer that is gone for good.
-- ARGV: producer
-- Returns 1, or 0 while entries of it are open.
local prefix = ARGV[1] .. ' '
if #redis.call('ZRANGEBYLEX', OPEN, '[' .. prefix .. '0', '(' .. prefix .. ':', 'LIMIT', 0, 1) > 0 then
  return 0
end
redis.call('HDEL', SEEN, ARGV[1])
redis.pcall('HDEL', SEEN_AT, ARGV[1])
return 1
