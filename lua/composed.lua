-- Common to the scripts that decide by running others and holding back their writes. Such a script NAME is all
-- algorithms and the frame as functions, then this text, then lua/NAME.lua.
--
-- ALGORITHMS has each algorithm's script under its name, as function(KEYS, ARGV, redis).

-- The limits at the start of ARGV, in the order of KEYS: for each, its script's name, the count of its own arguments,
-- and the arguments. What follows begins at `at`.
local limits, at = {}, 1
while ALGORITHMS[ARGV[at]] do
  local own = tonumber(ARGV[at + 1])
  if not (own and own >= 2 and own <= #ARGV and own % 1 == 0) then break end
  limits[#limits + 1] = { key = KEYS[#limits + 1], script = ARGV[at], first = at + 2, last = at + 1 + own, writes = {} }
  at = at + 2 + own
end

-- What is wrong with them or with the arguments that follow, whose names these are; nothing if all can be read.
local function fault_of(...)
  if ALGORITHMS[ARGV[at]] then return 'no count of arguments after ' .. ARGV[at] end
  if #limits == 0 or #ARGV >= at + select('#', ...) then return 'no known script: ' .. (ARGV[at] or '') end
  for offset, name in ipairs({ ... }) do
    local given = ARGV[at + offset - 1]
    if not given then return 'missing ' .. name end
    if name ~= 'mode' and not tonumber(given) then return name .. ' is no number' end
  end
end

-- Redis's error for a command that it refused, its code first, with the command, which Redis 7.0 leaves out.
local function refusal(said, command)
  return redis.error_reply(said .. ' command: ' .. string.lower(command))
end

-- Runs a limit's script: all see one time, and writes are held back. A command is noted while it is being called.
local clock, held, calling
local recorder = { error_reply = redis.error_reply, acl_check_cmd = redis.acl_check_cmd }
function recorder.call(command, ...)
  if command == 'TIME' and clock then return clock end
  local writes = command ~= 'GET' and (command == 'SET' or command == 'SETRANGE' or command == 'DEL'
    or command == 'PEXPIRE' or command == 'PEXPIREAT' or command == 'ZADD' or command == 'ZREM'
    or command == 'ZREMRANGEBYSCORE')
  if writes then
    held[#held + 1] = { command, ... }
    return
  end
  calling = command
  local reply = redis.call(command, ...)
  calling = nil
  if command == 'TIME' then clock = reply end
  return reply
end

-- Runs one limit's script, with these as cost, mode and now_us; its writes are held back.
local function decide(limit, ...)
  limit.writes = {}
  held = limit.writes
  local arguments = { unpack(ARGV, limit.first, limit.last) }
  for _, argument in ipairs({ ... }) do arguments[#arguments + 1] = argument end
  local done, reply = pcall(ALGORITHMS[limit.script], { limit.key }, arguments, recorder)
  if done then return reply end
  return calling and type(reply) == 'string' and refusal(reply, calling) or error(reply, 0)
end

-- Makes the writes that were held back, up to one that is refused.
local function write(limit)
  for _, write in ipairs(limit.writes) do
    local reply = redis.pcall(unpack(write))
    if type(reply) == 'table' and reply.err then return refusal(reply.err, write[1]) end
  end
end

