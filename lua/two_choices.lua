-- two_choices: decides by the better of two shards of a limit, and leaves the other as it is.
--
-- KEYS
--   KEYS[1]  one shard's state
--   KEYS[2]  another's
--
-- ARGV
--   for each shard, in the order of KEYS: its script's name, the count of its own arguments, the arguments
--   then, for both:
--   cost    units  0 ..
--   mode    -      acquire | peek | reserve | at-most | refund | penalty; and its options, but for +block
--   now_us  us     0 .. 2^52, or -1 for the server's time
--
-- Reply
--   what the script of the chosen shard answers
--
-- Formula
--   Each shard's own script runs as it stands, as a function of KEYS, ARGV and redis. Its writes are held back, and
--   those of the chosen one are made. Both see one time. Chosen is, in this order: who allows; of whom more remains; who has
--   the shorter wait, or is sooner as if never used; the first. A refund goes to the one of which more is used.
--
-- Source
--   The power of two choices: of two places drawn by chance, take the less loaded one (Azar, Broder, Karlin and Upfal,
--   1994).
--
-- Commands
--   TIME, and those of the scripts
--
-- Expiry
--   as the scripts'
--
-- A deny writes
--   what the script that denies would write alone: nothing, but for the cases that it names.

-- ALGORITHMS is filled in before this file: each script under its name, as function(KEYS, ARGV, redis).
local shards, at = {}, 1
while ALGORITHMS[ARGV[at]] do
  local own = tonumber(ARGV[at + 1])
  if not (own and own >= 2 and own <= #ARGV and own % 1 == 0) then break end
  shards[#shards + 1] = { key = KEYS[#shards + 1], script = ARGV[at], first = at + 2, last = at + 1 + own }
  at = at + 2 + own
end
local cost, mode, now_us = ARGV[at], ARGV[at + 1], ARGV[at + 2]

local OPERATIONS = { acquire = 1, peek = 2, reserve = 3, ['at-most'] = 4, refund = 5, penalty = 6 }
local operation, fault = mode and string.match(mode, '^[^+]*'), nil
if ALGORITHMS[ARGV[at]] then
  fault = 'no count of arguments after ' .. ARGV[at]
elseif #shards < 2 or #ARGV > at + 2 then
  fault = 'no known script: ' .. (ARGV[at] or '')
elseif #shards > 2 or #KEYS ~= 2 or KEYS[1] == KEYS[2] then
  fault = 'KEYS and scripts are not two'
elseif mode and string.find(mode, '+block', 1, true) then
  fault = 'a block of one shard alone: ' .. mode
elseif not (now_us and tonumber(cost) and tonumber(now_us) and OPERATIONS[operation]) then
  for offset, name in ipairs({ 'cost', 'mode', 'now_us' }) do
    local given = ARGV[at + offset - 1]
    if not fault and not given then fault = 'missing ' .. name end
    if not fault and name ~= 'mode' and not tonumber(given) then fault = name .. ' is no number' end
  end
  fault = fault or 'no mode that takes or gives back: ' .. mode
end
if fault then
  return redis.error_reply('BADARG two_choices: expected of each of two shards its script, the count of its arguments '
    .. 'and these, then cost, mode, now_us; ' .. string.gsub(fault, '[^ -~]', '?'))
end

-- What Redis says of a command that it refused, its code first, and which it was: Redis 7.0 leaves that out.
local function refusal(said, command)
  return redis.error_reply(said .. ' command: ' .. string.lower(command))
end

-- A shard's script runs on this: both see one time, and writes are held back. What is called is noted until it is done.
local clock, held, calling
local recorder = { error_reply = redis.error_reply }
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

-- Runs one shard's script; its writes are held in a list of their own.
local function decide(shard, units, as)
  shard.writes = {}
  held = shard.writes
  local arguments = { unpack(ARGV, shard.first, shard.last) }
  local count = #arguments
  arguments[count + 1], arguments[count + 2], arguments[count + 3] = units, as, now_us
  local done, reply = pcall(ALGORITHMS[shard.script], { shard.key }, arguments, recorder)
  if done then return reply end
  return calling and type(reply) == 'string' and refusal(reply, calling) or error(reply, 0)
end

-- A refund that fills a shard no longer tells how much was used of it.
local refunds = operation == 'refund'
local one, other
for index, shard in ipairs(shards) do
  local reply = decide(shard, refunds and '0' or cost, refunds and 'peek' or mode)
  if reply.err then return reply end
  if index == 1 then one = reply else other = reply end
end

-- Whether the second is better to take from.
local function better()
  if one[1] ~= other[1] then return other[1] == 1 end
  local granted = operation == 'at-most'
  local left, others = one[3] + (granted and one[6] or 0), other[3] + (granted and other[6] or 0)
  if left ~= others then return others > left end
  local wait, its = one[4] < 0 and math.huge or one[4], other[4] < 0 and math.huge or other[4]
  if wait ~= its then return its < wait end
  return other[5] < one[5]
end

local chosen
if refunds then
  local used, its = one[2] - one[3], other[2] - other[3]
  if used == its then used, its = one[5], other[5] end
  chosen = its > used and 2 or 1
else
  chosen = better() and 2 or 1
end
local shard, reply = shards[chosen], chosen == 1 and one or other
if refunds then
  reply = decide(shard, cost, mode)
  if reply.err then return reply end
end
for _, write in ipairs(shard.writes) do
  local made = redis.pcall(unpack(write))
  if type(made) == 'table' and made.err then return refusal(made.err, write[1]) end
end
return reply
