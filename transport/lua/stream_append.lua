#!lua
-- Between the entries of an append: book the one just added, and let the next one in or not.
--
-- The entries themselves are plain XADDs with NOMKSTREAM in the same transaction, so that their payloads do not pass through
-- Lua, which would cost as much again as storing them. An entry is kept out by having no stream to go to: its key is renamed
-- until the next call; nobody outside of the transaction sees that.
-- ARGV: producer, lowest sequence number that it still holds, sequence number of the entry before this call ('': none),
--       of the entry after it ('': none)
-- Returns the sequence number that is expected next.
local SHUT = STREAM .. ':shut'
local last = tonumber(redis.call('HGET', SEEN, ARGV[1]) or '-1')
local expected = math.max(last + 1, tonumber(ARGV[2]))
local there = redis.call('EXISTS', STREAM) == 1

if there and ARGV[3] ~= '' then
  -- Its id: no command tells the last one without a copy of the payload, but a group made there does.
  redis.call('XGROUP', 'CREATE', STREAM, 'anabranch:last', '$')
  local id
  for _, group in ipairs(all_groups()) do
    if group['name'] == 'anabranch:last' then
      id = group['last-delivered-id']
    end
  end
  redis.call('XGROUP', 'DESTROY', STREAM, 'anabranch:last')
  if id == '18446744073709551615-18446744073709551615' then
    -- Somebody used up the ids: the entry was refused, and this is theirs.
    return redis.error_reply('ERR the stream has no ids left, since somebody else added an entry with the highest')
  end
  note_open(id, ARGV[1], ARGV[3])
  redis.call('HSET', SEEN, ARGV[1], ARGV[3])
  count('produced', 1)
  redis.pcall('HSET', SEEN_AT, ARGV[1], string.format('%.0f', now_ms()))  -- for people alone: nothing waits for it
  expected = tonumber(ARGV[3]) + 1
elseif not there and redis.call('EXISTS', SHUT) == 1 then
  redis.call('RENAME', SHUT, STREAM)
  there = true
end

if ARGV[4] ~= '' then
  local welcome = tonumber(ARGV[4]) == expected
  if welcome and not there then
    redis.call('XGROUP', 'CREATE', STREAM, 'anabranch:last', '$', 'MKSTREAM')
    redis.call('XGROUP', 'DESTROY', STREAM, 'anabranch:last')
  elseif there and not welcome then
    redis.call('RENAME', STREAM, SHUT)
  end
end
return expected
