#!lua flags=no-writes
-- What is known of a producer.
-- ARGV: producer
-- Returns {highest sequence number stored or '', lowest that is open or '', ms since the last was stored or ''}.
local prefix = ARGV[1] .. ' '
local open = redis.call('ZRANGEBYLEX', OPEN, '[' .. prefix .. '0', '(' .. prefix .. ':', 'LIMIT', 0, 1)
local at = redis.pcall('HGET', SEEN_AT, ARGV[1])
at = type(at) == 'string' and tonumber(at)
return {redis.call('HGET', SEEN, ARGV[1]) or '', open[1] and string.sub(open[1], #prefix + 1) or '',
  at and at > 0 and string.format('%.0f', math.max(0, now_ms() - at)) or ''}
