-- all_or_nothing: decides several limits at once: either each is charged, or none. Remembers a call by an id, so that
-- it is charged once however often it is sent, and can be settled later.
--
-- KEYS
--   KEYS[i]  the i-th limit's state; no two alike
--   last     the id's marker, if id_ttl is not 0
--
-- ARGV
--   for each limit, in the order of KEYS: its script's name, the count of its own arguments, the arguments
--   then, for all of them:
--   id_ttl  ms     how long the id is remembered; 0 without an id
--   cost    units  0 ..
--   mode    -      acquire | peek | reserve | at-most | refund | penalty | block | renew | release | reset, or with an
--                  id settle | cancel; and its options
--   now_us  us     0 .. 2^52, or -1 for the server's time
--
-- Reply
--   for each limit, in the order of KEYS, the five integers of its script; where one denies, the others' are those of
--   their untouched keys
--   at-most, and every call with an id, appends:
--   granted  units  taken from each
--   where a key is blocked, and with +overage, then for each limit:
--   blocked_us, overage
--
-- Formula
--   Each limit's own script runs as it stands, as a function of KEYS, ARGV and redis. Its writes are held back until
--   all have allowed. All see one time.
--   An allowed call with an id leaves the marker with its answer; the same id gets that answer again, charged once, for
--   as long as the permits that it took are held.
--   settle makes `cost` what a call of this id took in the end: more is charged, whether it is there or not, less is
--   given back; once. cancel gives all of it back and forgets the id. An id of which nothing that was taken is
--   remembered is the error BADID. reset and release forget the id too.
--
-- Source
--   Two-phase commit, within one script.
--
-- Commands
--   TIME, and those of the scripts; with an id GET, SET; reset, release and cancel: DEL
--
-- Expiry
--   as the scripts'; the marker's is id_ttl, with now_us an hour at least
--
-- A deny writes
--   what the scripts that deny would write alone: nothing, but for the cases that they name.

-- ALGORITHMS is filled in before this file: each script under its name, as function(KEYS, ARGV, redis).
local id_ttl, cost, mode, now_us = ARGV[#ARGV - 3] + 0, ARGV[#ARGV - 2], ARGV[#ARGV - 1], ARGV[#ARGV]
local options = string.match(mode, '%+.*') or ''
mode = string.sub(mode, 1, #mode - #options)
local count = id_ttl > 0 and #KEYS - 1 or #KEYS
local marker = id_ttl > 0 and KEYS[#KEYS]

-- The marker: which operation it remembers and whether that was settled, the units it took, the caller's time if it was
-- given, and the answer.
local OPERATIONS = { acquire = 1, reserve = 2, ['at-most'] = 3, refund = 4, penalty = 5 }
local REMEMBERED, SETTLED, HEADER = 96, 112, 15
local virtual = now_us + 0 >= 0
local operation, took
local forgets, ends = mode == 'reset' or mode == 'release', mode == 'settle' or mode == 'cancel'
if not (forgets or ends or OPERATIONS[mode]) then marker = nil end
local remembered
if marker and not forgets then
  if not (id_ttl % 1 == 0 and cost + 0 >= 0 and cost + 0 <= 2^53) then
    return redis.error_reply('BADARG all_or_nothing: with an id, expected a whole id_ttl and a cost up to 2^53, got '
      .. cost)
  end
  local memory = redis.call('GET', marker)
  local settled = false
  if memory then
    local time
    local good = #memory == HEADER + count * 35
    if good then
      operation, took, time = struct.unpack('<BI7I7', memory)
      settled = operation >= SETTLED
      operation = operation - (settled and SETTLED or REMEMBERED)
      good = operation >= 1 and operation <= 5 and took <= 2^53 and time <= 2^52
      -- Only what was allowed is remembered.
      for at = HEADER + 1, #memory, 35 do
        local allowed, limit, remaining, retry_after, reset_after = struct.unpack('<i7i7i7i7i7', memory, at)
        good = good and allowed == 1 and limit <= 2^53 and remaining >= 0 and remaining <= limit
          and retry_after >= 0 and retry_after <= 2^53 and reset_after >= 0 and reset_after <= 2^53
      end
    end
    if not good then
      return redis.error_reply('BADSTATE all_or_nothing: the id\'s marker holds something else')
    end
    -- In the caller's own time, which Redis's expiry doesn't know.
    if virtual and time > 0 and now_us - time >= id_ttl * 1000 then memory, operation = nil, nil end
  end
  if ends and (not operation or operation == OPERATIONS.refund) then
    return redis.error_reply('BADID all_or_nothing: nothing that was taken is remembered of this id')
  elseif operation and not ends and operation ~= OPERATIONS[mode] then
    return redis.error_reply('BADARG all_or_nothing: expected an id of its own for each operation, got one of another')
  elseif operation and (not ends or (settled and mode == 'settle')) then
    local answer = {}
    for field = 1, count * 5 do answer[field] = struct.unpack('<i7', memory, HEADER + 1 + (field - 1) * 7) end
    answer[#answer + 1] = took
    remembered = answer
  end
end

-- Settling is a penalty or a refund of the difference, cancelling a refund of all.
local units, as = cost, mode
if mode == 'settle' then
  local more = cost - took
  as = more > 0 and 'penalty' or 'refund'
  units = string.format('%d', math.abs(more))
elseif mode == 'cancel' then
  as, units, cost = 'refund', string.format('%d', took), '0'
end

local clock, held
local recorder = { error_reply = redis.error_reply }
function recorder.call(command, ...)
  if command == 'TIME' then
    clock = clock or redis.call('TIME')
    return clock
  end
  local writes = command == 'SET' or command == 'SETRANGE' or command == 'DEL' or command == 'PEXPIRE'
    or command == 'PEXPIREAT' or command == 'ZADD' or command == 'ZREM' or command == 'ZREMRANGEBYSCORE'
  if not writes then return redis.call(command, ...) end
  held[#held + 1] = { command, ... }
end

-- Runs one limit's script; its writes are held in the list that `held` is then.
local function decide(limit, units, as)
  held = limit.writes
  local arguments = limit.arguments
  local count = #arguments
  arguments[count + 1], arguments[count + 2], arguments[count + 3] = units, as .. options, now_us
  local reply = ALGORITHMS[limit.script]({ limit.key }, arguments, recorder)
  arguments[count + 1], arguments[count + 2], arguments[count + 3] = nil, nil, nil
  return reply
end

local limits, seen, at = {}, {}, 1
for index = 1, count do
  local key = KEYS[index]
  local script, own = ARGV[at], ARGV[at + 1] + 0
  if seen[key] or not ALGORITHMS[script] then
    return redis.error_reply('BADARG all_or_nothing: expected different keys and known scripts, got ' .. script)
  end
  seen[key] = true
  limits[index] = { key = key, script = script, arguments = { unpack(ARGV, at + 2, at + 1 + own) }, writes = {} }
  at = at + 2 + own
end

local function write()
  for _, limit in ipairs(limits) do
    for _, write in ipairs(limit.writes) do redis.call(unpack(write)) end
  end
end

-- The same answer again, unless permits that it gave have gone since: then the call is decided anew.
if remembered then
  for _, limit in ipairs(limits) do
    if limit.script == 'concurrency' and (mode == 'acquire' or mode == 'at-most') and took > 0 then
      local reply = decide(limit, cost, 'renew')
      if reply.err then remembered = nil end
    end
  end
  if remembered then
    write()
    return remembered
  end
  for _, limit in ipairs(limits) do limit.writes = {} end
end

local replies, allowed, granted = {}, true, cost + 0
for index, limit in ipairs(limits) do
  local reply = decide(limit, units, as)
  if reply.err then return reply end
  replies[index] = reply
  allowed = allowed and reply[1] == 1
  if mode == 'at-most' and reply[6] < granted then granted = reply[6] end
end

-- What one limit has less of than the others is all that any may take.
if allowed and mode == 'at-most' then
  for index, limit in ipairs(limits) do
    if replies[index][6] > granted then
      limit.writes = {}
      replies[index] = decide(limit, string.format('%d', granted), mode)
    end
  end
end

-- Where another denies, this limit's key stays untouched, and it would still allow.
if not allowed then
  for index, limit in ipairs(limits) do
    if replies[index][1] == 1 then
      limit.writes = {}
      local untouched = decide(limit, cost, 'peek')
      untouched[1], untouched[4] = 1, 0
      replies[index] = untouched
    end
  end
end

write()

local answer, notes, noted = {}, {}, false
for _, reply in ipairs(replies) do
  for field = 1, 5 do answer[#answer + 1] = reply[field] end
  -- Only at-most has a sixth of its own.
  local own = #reply % 2 == 0 and 6 or 5
  notes[#notes + 1], notes[#notes + 2] = reply[own + 1] or 0, reply[own + 2] or 0
  noted = noted or #reply > own
end
if not allowed or mode == 'refund' or mode == 'block' or mode == 'renew' or forgets then granted = 0 end
if marker and (forgets or mode == 'cancel') then
  redis.call('DEL', marker)
elseif marker and allowed and mode ~= 'peek' then
  local kind = mode == 'settle' and SETTLED + operation or REMEMBERED + OPERATIONS[mode]
  local memory = struct.pack('<BI7I7', kind, granted, virtual and now_us or 0)
  for field = 1, #answer do memory = memory .. struct.pack('<i7', answer[field]) end
  local keep = virtual and math.max(id_ttl, 3600000) or id_ttl
  redis.call('SET', marker, memory, 'PX', string.format('%d', keep))
end
if marker or mode == 'at-most' then answer[#answer + 1] = granted end
if noted then
  for _, value in ipairs(notes) do answer[#answer + 1] = value end
end
return answer
