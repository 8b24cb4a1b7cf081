#!lua flags=no-writes
-- What is known of a producer.
-- ARGV: producer
-- Returns {highest sequence number stored or '', lowest that is open or ''}.
local prefix = ARGV[1] .. ' '
local open = redis.call('ZRANGEBYLEX', OPEN, '[' .. prefix .. '0', '(' .. prefix .. ':', 'LIMIT', 0, 1)
return {redis.call('HGET', SEEN, ARGV[1]) or '', open[1] and string.sub(open[1], #prefix + 1) or ''}
