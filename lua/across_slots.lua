#!lua flags=allow-cross-slot-keys
-- across_slots: what a script begins with where it decides on keys of several slots, all of one node of a cluster. The
-- complete text is that of this file and of the script, which it lets run unchanged.
--
-- KEYS
--   none: Redis refuses a call that declares a key of another node, or keys of two slots
--
-- ARGV
--   ARGV[1]  count  of keys, 2 .. 7997, those of one call in one slot
--   then the keys, and the script's arguments in their packed form
--
-- Reply
--   packed, as the script's. A call that a key was refused of, such as one whose slot is moving, has `allowed` -4 in
--   each of its records. Nothing was taken of it, and a call that declares its keys says why
--
-- Commands
--   those of the script, but no MGET: a command must not span slots

local count = tonumber(ARGV[1]) or 0
if count % 1 ~= 0 or count < 2 or count > 7997 or #ARGV < count + 2 then
  return redis.error_reply('BADARG across_slots: expected a count of 2 to 7997 keys, then the keys and the arguments')
end
local KEYS, ARGV = { unpack(ARGV, 2, count + 1) }, { unpack(ARGV, count + 2) }

-- Why each key was refused. Nothing more is written to it, and of a key's writes it is the last that takes the units.
-- A call's keys are all read before the first is written, and no slot moves within a script: what can be read is here,
-- and can be written. But a user may be allowed to read what he may not write, and to read by some commands alone. So
-- that is asked as well with the first reading of each key: what else reads it; and of calls of several keys (several
-- limits, or an id) that write, what writes it.
local refused, server = {}, redis
local redis = { error_reply = server.error_reply, acl_check_cmd = server.acl_check_cmd }
local sizes, place, limits = { 32, 36, 29, 18, 13, 10, [64] = 9 }, 1, 0
while sizes[string.byte(ARGV[1], place)] do
  -- 64: options of the limit before it.
  if string.byte(ARGV[1], place) ~= 64 then limits = limits + 1 end
  place = place + sizes[string.byte(ARGV[1], place)]
end
-- The time for which an id is remembered follows the values of 8 and 16, and is 0 where there is no marker.
local options = string.byte(ARGV[1], place + 1) or 0
local id_at = place + 9 + (options % 16 >= 8 and 7 or 0) + (options % 32 >= 16 and 7 or 0)
local has_marker = options % 64 >= 32 and string.sub(ARGV[1], id_at, id_at + 6) ~= string.rep('\0', 7)
local several = limits > 1 or has_marker
local expire, writes = (ARGV[2] or '-1') == '-1' and 'PEXPIREAT' or 'PEXPIRE', {}
if several and string.byte(ARGV[1], place) ~= 131 then
  writes = { GET = { 'SET', 'SETRANGE' }, GETRANGE = { 'SET', 'SETRANGE', expire },
    ZRANGE = { 'ZADD', 'ZREM', 'ZREMRANGEBYSCORE', expire } }
  -- What gives back may leave a key as if never used.
  local gives = (string.byte(ARGV[1], place) or 0) > 132
  for _, commands in pairs(gives and writes or {}) do commands[#commands + 1] = 'DEL' end
end
local reads = { GETRANGE = { 'EXISTS', 'STRLEN' }, ZRANGE = { 'EXISTS', 'ZCOUNT', 'ZSCORE' } }

-- Of EXISTS and DEL all arguments are keys.
local function may(command, key)
  if not server.acl_check_cmd then return true end
  if command == 'EXISTS' or command == 'DEL' then return server.acl_check_cmd(command, key) end
  return server.acl_check_cmd(command, key, '1', '1')
end

-- The script reads a key by this first, and refuses the call if it is an error.
local none = {}
function redis.pcall(command, key, ...)
  local reply = refused[key] or server.pcall(command, key, ...)
  if type(reply) == 'table' and reply.err then
    if not string.find(reply.err, '^WRONGTYPE') then refused[key] = reply end
    return reply
  end
  for _, read in ipairs(reads[command] or none) do
    if not may(read, key) then refused[key] = { err = 'NOPERM expected a key to read' } end
  end
  for _, write in ipairs(writes[command] or none) do
    if not may(write, key) then refused[key] = { err = 'NOPERM expected a key to write' } end
  end
  return refused[key] or reply
end

-- In place of an error it answers false.
function redis.call(command, key, ...)
  if command == 'TIME' then return server.call('TIME') end
  if command ~= 'MGET' then
    local reply = refused[key] or server.pcall(command, key, ...)
    if type(reply) ~= 'table' or not reply.err then return reply end
    refused[key] = reply
    return false
  end
  local states = {}
  for index, each in ipairs({ key, ... }) do
    local state = redis.pcall('GET', each)
    -- What isn't read here is read again by itself.
    states[index] = type(state) == 'string' and state
  end
  return states
end

