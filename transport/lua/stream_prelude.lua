-- What the stream's scripts share; scripts.load puts it between a script's first line and the rest.
-- KEYS of each: stream, seen, ledger, open, open_ids, dead letters, seen_at (schemas/keys.py).
local STREAM, SEEN, LEDGER, OPEN, OPEN_IDS, DEAD, SEEN_AT = unpack(KEYS)

-- Unix ms, by this server's clock.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function count(field, by)
  redis.call('HINCRBY', LEDGER, field, by)
end

-- An entry is stored that the learner's group has to settle.
local function note_open(id, producer, seq)
  local member = producer .. ' ' .. string.format('%020.0f', tonumber(seq))
  if redis.call('ZADD', OPEN, 0, member) == 1 then
    redis.call('HSET', OPEN_IDS, id, member)
  end
end

-- The learner's group is done with an entry. (An empty fate is that of another group: it settles nothing for the learner.)
local function note_fate(id, fate)
  if fate == '' then
    return
  end
  local member = redis.call('HGET', OPEN_IDS, id)
  if member then
    redis.call('HDEL', OPEN_IDS, id)
    redis.call('ZREM', OPEN, member)
  end
  count(fate, 1)
end

-- Ends the script, before it has written anything, if a fate could not be booked: one of the keys is of another type, or a
-- count is no number. What is acknowledged and not booked never would be.
local function try_books(fate)
  redis.call('ZCARD', OPEN)
  redis.call('HLEN', OPEN_IDS)
  if fate == '' then
    redis.call('HLEN', LEDGER)
  else
    count(fate, 0)
  end
end

-- A flat reply of names and values, as a table.
local function named(flat)
  local found = {}
  for i = 1, #flat, 2 do
    found[flat[i]] = flat[i + 1]
  end
  return found
end

local function all_groups()
  local found = {}
  if redis.call('EXISTS', STREAM) == 1 then
    for i, info in ipairs(redis.call('XINFO', 'GROUPS', STREAM)) do
      found[i] = named(info)
    end
  end
  return found
end

-- Entries that a group (of all_groups) has not read.
local function undelivered(group)
  -- The server's lag is exact where it gives one (nobody deletes in mid-stream here); else count, a few at a time.
  if type(group['lag']) == 'number' then
    return group['lag']
  end
  local found, after = 0, group['last-delivered-id']
  repeat
    local page = redis.call('XRANGE', STREAM, '(' .. after, '+', 'COUNT', 16)
    found = found + #page
    after = page[1] and page[#page][1]
  until #page == 0
  return found
end

-- Entries that producers did not append, and those that a group made anew gets a second time. Less than none: the stream
-- was deleted, and the ledger is to show it.
local function foreign(counted)
  local added = 0
  if redis.call('EXISTS', STREAM) == 1 then
    added = named(redis.call('XINFO', 'STREAM', STREAM))['entries-added']
  end
  local ours = (counted['produced'] or 0) + (counted['requeued'] or 0)
  return math.max(0, added - ours) + (counted['again'] or 0)
end

local function split(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

-- Settle for the learner's group what it can never be given though it is open: entries that somebody deleted before they
-- were delivered, and those that a group made in mid-stream passes over. Without the group: entries that are deleted.
local function settle_lost(fate, group)
  local last_ms, last_seq = -1, 0
  if group then
    last_ms, last_seq = split(group['last-delivered-id'])
  end
  for _, id in ipairs(redis.call('HKEYS', OPEN_IDS)) do
    local ms, seq = split(id)
    local waits = ms > last_ms or (ms == last_ms and seq > last_seq)
    if waits then
      waits = #redis.call('XRANGE', STREAM, id, id) > 0
    else
      waits = #redis.call('XPENDING', STREAM, group['name'], id, id, 1) > 0
    end
    if not waits then
      note_fate(id, fate)
    end
  end
end
