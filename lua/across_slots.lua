#!lua flags=allow-cross-slot-keys
-- across_slots: what the script of an algorithm begins with where it decides on keys of several slots, all of one node
-- of a cluster. The complete text is that of this file and of the script, which it lets run unchanged.
--
-- KEYS
--   none: Redis refuses a call that declares a key of another node, or keys of two slots
--
-- ARGV
--   ARGV[1]  count  of keys, 2 .. 7997, no two alike
--   then the keys, and the script's arguments in their packed form
--
-- Reply
--   packed, as the script's. A key that a command failed on, such as one whose slot is moving, has i7i7i7i7:
--   -1, 0, 0, -4. Nothing was taken of it, and a call that declares it says why it failed
--
-- Commands
--   those of the script, but no MGET: a command must not span slots

local count = tonumber(ARGV[1]) or 0
if count % 1 ~= 0 or count < 2 or count > 7997 or #ARGV <= count then
  return redis.error_reply('BADARG across_slots: expected a count of 2 to 7997 keys, then the keys and the arguments')
end
local KEYS, ARGV = { unpack(ARGV, 2, count + 1) }, { unpack(ARGV, count + 2) }

-- The keys that a command failed on. To the script each of them is missing, and nothing is written to it any more. Of
-- a key's writes only the last can take units, or all that can are of one command, so that the first of them fails.
local refused, call, pcall, concat, type = {}, redis.call, redis.pcall, table.concat, type
local redis, table = { error_reply = redis.error_reply }, {}

function redis.pcall(command, key, a, b, c)
  if not refused[key] then
    local reply = pcall(unpack({ command, key, a, b, c }))
    if type(reply) ~= 'table' or not reply.err or string.find(reply.err, '^WRONGTYPE') then return reply end
    refused[key], redis.call = true, redis.pcall
  end
  return command == 'GETRANGE' and '' or command == 'EXISTS' and 0
end

function redis.call(command, key, a, b, c)
  -- The short way of most decisions. Once a command has failed, every other one goes by redis.pcall, which knows of it.
  if command == 'SETRANGE' then
    local reply = pcall('SETRANGE', key, a, b)
    if type(reply) == 'number' then return reply end
    refused[key], redis.call = true, redis.pcall
    return false
  elseif command == 'TIME' then
    return call('TIME')
  elseif command ~= 'MGET' then
    return redis.pcall(command, key, a, b, c)
  end
  local states = {}
  for index = 1, count do
    local state = pcall('GET', KEYS[index])
    -- What isn't read here is read again by itself.
    states[index] = type(state) == 'string' and state
  end
  return states
end

function table.concat(answers, between)
  if next(refused) then
    for index, key in ipairs(KEYS) do
      if refused[key] then answers[index] = struct.pack('<i7i7i7i7', -1, 0, 0, -4) end
    end
  end
  return concat(answers, between)
end

