#!lua flags=allow-oom
-- Drop manifests that nothing protects, and the chunks that no manifest names any more.
-- KEYS: head, index, blob references, garbage, leases, expiries of leases, pins
-- ARGV: prefix of manifest keys, prefix of blob keys ('' when chunks are kept elsewhere), grace in ms, head as the caller
--       saw it ('' none), number of pins, pins..., number of entries that must stay, those..., members to drop...
-- Returns {'changed'} if head, pins or the entries that must stay are not what the caller saw, else {'ok', those of the
-- members to drop that are not there any more}.
local manifests, blobs, grace = ARGV[1], ARGV[2], tonumber(ARGV[3])
local index, references, garbage = KEYS[2], KEYS[3], KEYS[4]
local BATCH = 1000 -- arguments of one command: unpack has a limit of 8000
local at = 5
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[4] then
  return {'changed'}
end
local pinned = {}
for _ = 1, tonumber(ARGV[at]) do
  at = at + 1
  pinned[ARGV[at]] = true
end
local now_pinned = redis.call('HKEYS', KEYS[7])
local as_seen = 0
for _, pin in ipairs(now_pinned) do
  as_seen = as_seen + (pinned[pin] and 1 or 0)
end
if as_seen ~= #now_pinned or as_seen ~= tonumber(ARGV[5]) then
  return {'changed'}
end
at = at + 1
for _ = 1, tonumber(ARGV[at]) do
  at = at + 1
  if not redis.call('ZSCORE', index, ARGV[at]) then
    return {'changed'}
  end
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local head = redis.call('GET', KEYS[1])
local low_epoch, low_version = math.huge, math.huge -- of head and leases: all from there on stays
if head then
  local found = cjson.decode(head)
  low_epoch, low_version = found.epoch, found.version
end
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], '(' .. string.format('%d', now_ms), '+inf')) do
  local epoch, version = string.match(redis.call('HGET', KEYS[5], holder) or '', '^(%d+):(%d+)$')
  epoch, version = tonumber(epoch), tonumber(version)
  if epoch and (epoch < low_epoch or (epoch == low_epoch and version < low_version)) then
    low_epoch, low_version = epoch, version
  end
end

local function release_batch(batch)
  local kept, free = {}, {}
  for i, count in ipairs(redis.call('HMGET', references, unpack(batch))) do
    if count and tonumber(count) > 1 then
      kept[#kept + 1] = batch[i]
      kept[#kept + 1] = string.format('%d', count - 1)
    else
      free[#free + 1] = batch[i]
    end
  end
  if #kept > 0 then
    redis.call('HSET', references, unpack(kept))
  end
  if #free == 0 then
    return
  end
  redis.call('HDEL', references, unpack(free))
  if blobs == '' then
    local named, due = {}, string.format('%d', now_ms + grace)
    for _, digest in ipairs(free) do
      named[#named + 1] = due
      named[#named + 1] = digest
    end
    redis.call('ZADD', garbage, 'GT', unpack(named))
    return
  end
  local named = {}
  for i, due in ipairs(redis.call('ZMSCORE', garbage, unpack(free))) do
    local left_ms = due and tonumber(due) - now_ms or 0
    if left_ms > 0 then -- put again lately, see weights_put_again: its commit may be under way
      redis.call('PEXPIRE', blobs .. free[i], string.format('%d', left_ms))
    else
      named[#named + 1] = blobs .. free[i]
    end
  end
  redis.call('ZREM', garbage, unpack(free))
  if #named > 0 then
    redis.call('UNLINK', unpack(named))
  end
end

local function release(text)
  local seen, batch = {}, {}
  for _, chunk in ipairs(cjson.decode(text).chunks) do
    if not seen[chunk.digest] then
      seen[chunk.digest] = true
      batch[#batch + 1] = chunk.digest
      if #batch == BATCH then
        release_batch(batch)
        batch = {}
      end
    end
  end
  if #batch > 0 then
    release_batch(batch)
  end
end

local gone = {'ok'}
for i = at + 1, #ARGV do
  local member = ARGV[i]
  local epoch, version, label = string.match(member, '^(%d+):(%d+):(%w+):')
  local e, v = tonumber(epoch), tonumber(version)
  if e and (e < low_epoch or (e == low_epoch and v < low_version)) and not pinned[epoch .. ':' .. version] then
    -- The index first: who reads it finds no entry without its manifest.
    if redis.call('ZREM', index, member) == 1 then
      local key = manifests .. epoch .. ':' .. version .. ':' .. label
      local text = redis.call('GET', key)
      if text then
        redis.call('DEL', key)
        release(text)
      end
    end
    gone[#gone + 1] = member
  end
end
return gone
