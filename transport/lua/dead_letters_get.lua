#!lua flags=no-writes
-- One dead letter.
-- ARGV: id
-- Returns {field, value, ...}, empty if there is none.
local page = redis.call('XRANGE', DEAD, ARGV[1], ARGV[1])
return page[1] and page[1][2] or {}
