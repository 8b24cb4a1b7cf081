#!lua flags=allow-oom
-- A reader of another group than the learner's is gone for good: nothing waits for it any more.
-- ARGV: group
-- Returns 1, or 0 if there is no such group.
if redis.call('EXISTS', STREAM) == 0 then
  return 0
end
return redis.call('XGROUP', 'DESTROY', STREAM, ARGV[1])
