-- two_choices: decides by the better of two shards of a limit, and leaves the other unchanged.
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
--   Each shard's own script runs unchanged, as a function of KEYS, ARGV and redis. Its writes are held back, and those
--   of the chosen shard are made. Both see one time. The choice, in this order: the shard that allows; with more
--   remaining; with the shorter wait, or sooner as if never used; the first. A refund goes to the shard of which more
--   is used.
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
--   what the denying script would write alone: nothing, except in the cases that it names.

local OPERATIONS = { acquire = 1, peek = 2, reserve = 3, ['at-most'] = 4, refund = 5, penalty = 6 }
local cost, mode, now_us = ARGV[at], ARGV[at + 1], ARGV[at + 2]
local operation, fault = mode and string.match(mode, '^[^+]*'), fault_of('cost', 'mode', 'now_us')
if not fault and (#limits ~= 2 or #KEYS ~= 2 or KEYS[1] == KEYS[2]) then
  fault = 'KEYS and scripts are not two'
elseif not fault and string.find(mode, '+block', 1, true) then
  fault = 'a block of one shard alone: ' .. mode
elseif not fault and not OPERATIONS[operation] then
  fault = 'no mode that takes or gives back: ' .. mode
end
if fault then
  return redis.error_reply('BADARG two_choices: expected of each of two shards its script, the count of its arguments '
    .. 'and these, then cost, mode, now_us; ' .. string.gsub(fault, '[^ -~]', '?'))
end

-- A refund that fills a shard no longer shows how much of it was used.
local refunds = operation == 'refund'
local one, other
for index, shard in ipairs(limits) do
  local reply = decide(shard, refunds and '0' or cost, refunds and 'peek' or mode, now_us)
  if reply.err then return reply end
  if index == 1 then one = reply else other = reply end
end

-- Whether it is better to take from the second shard.
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
local shard, reply = limits[chosen], chosen == 1 and one or other
if refunds then
  reply = decide(shard, cost, mode, now_us)
  if reply.err then return reply end
end
return write(shard) or reply
