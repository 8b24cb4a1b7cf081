#!lua
-- Store a manifest and its index entry; move the head to it if its version is new. Or refuse.
-- KEYS: head, opened epoch, index, blob references, garbage, manifest, layout
-- ARGV: epoch, version, kind, manifest JSON, index member, score, base's score ('' none), base's digest, base as
--       "eE.vV" ('' none), head JSON, prefix of blob keys ('' when chunks are kept elsewhere), digests (64 characters
--       each, one after the other; none twice)
-- Returns {'ok'}, or a refusal and what it met: see weight_rules.refusal
local epoch, version, kind, text, member, score = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local base_score, base_digest, base_head, new_head, prefix, digests = ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12]
local index, references, garbage = KEYS[3], KEYS[4], KEYS[5]
local BATCH = 1000 -- arguments of one command: unpack has a limit of 8000

local function digest_of(entry)
  return string.match(entry, ':(%x+)$')
end

local function each_batch(act)
  local count = #digests / 64
  for first = 0, count - 1, BATCH do
    local batch = {}
    for i = first, math.min(first + BATCH, count) - 1 do
      batch[#batch + 1] = string.sub(digests, 64 * i + 1, 64 * i + 64)
    end
    local refused = act(batch)
    if refused then
      return refused
    end
  end
end

local function named(batch)
  local keys = {}
  for i, digest in ipairs(batch) do
    keys[i] = prefix .. digest
  end
  return keys
end

-- A chunk outside of Redis was put through the channel, or is that of another manifest: the hub has heard of it.
local function find_missing(batch)
  if prefix ~= '' then
    local keys = named(batch)
    if redis.call('EXISTS', unpack(keys)) == #keys then
      return
    end
    for i, key in ipairs(keys) do
      if redis.call('EXISTS', key) == 0 then
        return {'missing', 'chunk ' .. batch[i]}
      end
    end
  else
    local due = redis.call('ZMSCORE', garbage, unpack(batch))
    for i, digest in ipairs(batch) do
      if not (due[i] and tonumber(due[i]) > 0) and redis.call('HEXISTS', references, digest) == 0 then
        return {'missing', 'chunk ' .. digest}
      end
    end
  end
end

-- Anybody may have written to the head; a script error would not say so.
local function is_whole(number)
  return type(number) == 'number' and number >= 0 and number % 1 == 0
end

local opened = redis.call('GET', KEYS[2]) or '0'
if not is_whole(tonumber(opened)) then
  return {'unreadable', 'the number of the epoch that is open'}
end
if tonumber(opened) > epoch then
  return {'fenced', opened}
end
local head, shown = redis.call('GET', KEYS[1]), 'nothing'
local now
if head then
  local parsed
  parsed, now = pcall(cjson.decode, head)
  if not (parsed and type(now) == 'table' and is_whole(now.epoch) and is_whole(now.version)) then
    return {'unreadable', 'the head'}
  end
  shown = string.format('e%d.v%d', now.epoch, now.version)
  if now.epoch > epoch then
    return {'stale', shown}
  end
end
local existing = redis.call('GET', KEYS[6])
if existing then
  return existing == text and {'ok'} or {'differs', ''}
end
if base_score ~= '' then
  local bases = redis.call('ZRANGEBYSCORE', index, base_score, base_score)
  if #bases == 0 then
    return {'no base', ''}
  end
  if digest_of(bases[1]) ~= base_digest then
    return {'other base', digest_of(bases[1])}
  end
end
local there = redis.call('ZRANGEBYSCORE', index, score, score)
if #there > 0 then
  if digest_of(there[1]) ~= digest_of(member) then
    return {'other result', digest_of(there[1])}
  end
elseif kind == 'skip' then
  return {'unknown version', ''}
elseif kind == 'delta' and base_head ~= shown then
  return {'not the head', shown}
elseif now and now.epoch == epoch and now.version >= version then
  return {'passed', shown}
end
if redis.call('EXISTS', KEYS[7]) == 0 then
  return {'missing', 'its layout'}
end
local refused = each_batch(find_missing)
if refused then
  return refused
end

redis.call('SET', KEYS[6], text)
each_batch(function(batch)
  local counted = {}
  for i, count in ipairs(redis.call('HMGET', references, unpack(batch))) do
    counted[2 * i - 1] = batch[i]
    counted[2 * i] = string.format('%d', (count or 0) + 1)
  end
  redis.call('HSET', references, unpack(counted))
  redis.call('ZREM', garbage, unpack(batch))
  if prefix == '' then
    return
  end
  for _, key in ipairs(named(batch)) do
    redis.call('PERSIST', key)
  end
end)
redis.call('ZADD', index, score, member)
if #there == 0 then
  redis.call('SET', KEYS[1], new_head)
end
return {'ok'}
