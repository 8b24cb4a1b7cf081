#!lua flags=allow-oom
-- Leave a producer's status, with the time of the report.
-- KEYS: producers, seen
-- ARGV: producer, status JSON
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)), ARGV[1])
return 1
