#!lua
-- Open the next epoch of a run, above every one opened or published before and above what the caller knows of.
-- KEYS: epoch, head
-- ARGV: an epoch to stay above
-- Returns {new epoch}, or {0, what is not readable}: anybody may have written there.
local function is_whole(number)
  return type(number) == 'number' and number >= 0 and number % 1 == 0
end

local head, published = redis.call('GET', KEYS[2]), 0
if head then
  local parsed, found = pcall(cjson.decode, head)
  if not (parsed and type(found) == 'table' and is_whole(found.epoch)) then
    return {0, 'the head'}
  end
  published = found.epoch
end
local opened = tonumber(redis.call('GET', KEYS[1]) or '0')
if not is_whole(opened) then
  return {0, 'the number of the epoch that is open'}
end
local newest = math.max(opened, tonumber(ARGV[1]), published)
redis.call('SET', KEYS[1], string.format('%d', newest + 1))
return {newest + 1}
