-- all_or_nothing: decides several limits at once: either each is charged, or none.
--
-- KEYS
--   KEYS[i]  the i-th limit's state; no two alike
--
-- ARGV
--   for each limit, in the order of KEYS: its script's name, the count of its own arguments, the arguments
--   then, for all of them:
--   cost    units  0 ..
--   mode    -      acquire | peek | reserve | at-most | refund | penalty | reset
--   now_us  us     0 .. 2^52, or -1 for the server's time
--
-- Reply
--   for each limit, in the order of KEYS, the five integers of its script; where one denies, the others' are those of
--   their untouched keys
--   at-most appends:
--   granted  units  taken from each, of the cost at most
--
-- Formula
--   Each limit's own script runs as it stands, as a function of KEYS, ARGV and redis. Its writes are held back until
--   all have allowed. All see one time.
--
-- Source
--   Two-phase commit, within one script.
--
-- Commands
--   TIME, and those of the scripts
--
-- Expiry
--   as the scripts'
--
-- A deny writes
--   what the scripts that deny would write alone: nothing, unless a state's time was brought back to now.

-- ALGORITHMS is filled in before this file: each script under its name, as function(KEYS, ARGV, redis).
local cost, mode, now_us = ARGV[#ARGV - 2], ARGV[#ARGV - 1], ARGV[#ARGV]

local clock, held
local recorder = { error_reply = redis.error_reply }
function recorder.call(command, ...)
  if command == 'TIME' then
    clock = clock or redis.call('TIME')
    return clock
  end
  if command == 'GET' or command == 'GETRANGE' or command == 'PTTL' then return redis.call(command, ...) end
  held[#held + 1] = { command, ... }
end

-- Runs one limit's script; its writes are held in the list that `held` is then.
local function decide(limit, units, as)
  held = limit.writes
  local arguments = limit.arguments
  local count = #arguments
  arguments[count + 1], arguments[count + 2], arguments[count + 3] = units, as, now_us
  local reply = ALGORITHMS[limit.script]({ limit.key }, arguments, recorder)
  arguments[count + 1], arguments[count + 2], arguments[count + 3] = nil, nil, nil
  return reply
end

local limits, seen, at = {}, {}, 1
for index, key in ipairs(KEYS) do
  local script, count = ARGV[at], ARGV[at + 1] + 0
  if seen[key] or not ALGORITHMS[script] then
    return redis.error_reply('BADARG all_or_nothing: expected different keys and known scripts, got ' .. script)
  end
  seen[key] = true
  limits[index] = { key = key, script = script, arguments = { unpack(ARGV, at + 2, at + 1 + count) }, writes = {} }
  at = at + 2 + count
end

local replies, allowed, granted = {}, true, cost
for index, limit in ipairs(limits) do
  local reply = decide(limit, cost, mode)
  if reply.err then return reply end
  replies[index] = reply
  allowed = allowed and reply[1] == 1
  if mode == 'at-most' and reply[6] < granted + 0 then granted = reply[6] end
end

-- What one limit has less of than the others is all that any may take.
if allowed and mode == 'at-most' then
  for index, limit in ipairs(limits) do
    limit.writes = {}
    replies[index] = decide(limit, string.format('%d', granted), mode)
  end
end

if not allowed then
  for index, limit in ipairs(limits) do
    if replies[index][1] == 1 then
      limit.writes = {}
      replies[index] = decide(limit, cost, 'peek')
    end
  end
end

for _, limit in ipairs(limits) do
  for _, write in ipairs(limit.writes) do redis.call(unpack(write)) end
end

local answer = {}
for _, reply in ipairs(replies) do
  for field = 1, 5 do answer[#answer + 1] = reply[field] end
end
if mode == 'at-most' then answer[#answer + 1] = allowed and granted + 0 or 0 end
return answer
