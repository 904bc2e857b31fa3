-- all_or_nothing: decides several limits at once: either each is charged, or none. Remembers a call by an id, so that
-- it is charged once however often it is sent, and can be settled later.
--
-- KEYS
--   KEYS[i]  the i-th limit's state; no two keys alike
--   last     the id's marker, if id_ttl is not 0
--
-- ARGV
--   for each limit, in the order of KEYS: its script's name, the count of its own arguments, the arguments
--   then, for all of them:
--   id_ttl  ms     0 .. 2^52: how long the id is remembered; 0 without an id
--   cost    units  0 .., with an id up to 2^53
--   mode    -      acquire | peek | reserve | at-most | refund | penalty | block | renew | release | reset, or with an
--                  id settle | cancel; and its options
--   now_us  us     0 .. 2^52, or -1 for the server's time
--
-- Reply
--   for each limit, in the order of KEYS, the five integers of its script; if one denies, the others' are those of
--   their untouched keys
--   at-most, and with an id every mode but peek, block and renew, appends:
--   granted  units  taken from each, 0 of a denied call
--   where a key is blocked, and with +overage, then for each limit:
--   blocked_us, overage
--
-- Formula
--   Each limit's own script runs unchanged, as a function of KEYS, ARGV and redis. Its writes are held back until
--   all have allowed. All see one time.
--   An allowed call with an id leaves the marker with its answer; the same id gets that answer again, charged once, for
--   as long as the permits that it took are held.
--   +within: each limit denies a reserve that would wait longer for it, and then nothing is taken.
--   settle makes `cost` the final cost of the call with this id, once: more is charged, available or not; less is given
--   back. The number of permits held doesn't change. cancel gives all of it back and forgets the id. An id for which
--   nothing taken is remembered is the error BADID. reset and release forget the id too.
--
-- Source
--   Two-phase commit, within one script.
--
-- Commands
--   TIME, and those of the scripts; with an id GET, SET, SETRANGE; reset, release and cancel: DEL
--
-- Expiry
--   as the scripts', except that a key left untouched by another limit's denial isn't kept longer after a change of
--   numbers; the marker's is id_ttl, with now_us at least an hour
--
-- A deny writes
--   what the denying scripts would write alone: nothing, except in the cases that they name. +block blocks the keys of
--   the limits that deny, and no others; none if one denies with never.

-- The limits at the start of ARGV; what follows begins at `at`. Before this file, src/algorithm.rs puts ALGORITHMS, each
-- algorithm's script under its name as function(KEYS, ARGV, redis).
local limits, at = {}, 1
while ALGORITHMS[ARGV[at]] do
  local own = tonumber(ARGV[at + 1])
  if not (own and own >= 2 and own <= #ARGV and own % 1 == 0) then break end
  limits[#limits + 1] = { key = KEYS[#limits + 1], script = ARGV[at], first = at + 2, last = at + 1 + own, writes = {} }
  at = at + 2 + own
end

-- Redis's error for a command that it refused, its code first, with the command, which Redis 7.0 leaves out.
local function refusal(said, command)
  return redis.error_reply(said .. ' command: ' .. string.lower(command))
end

-- What a limit's script calls commands by: all see one time, and writes are held back. A command is noted while it is
-- being called.
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

local count = #limits
local id_ttl, cost, mode, now_us = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), ARGV[at + 2], tonumber(ARGV[at + 3])

-- The marker: the operation that it remembers and whether that was settled, the units it took, the caller's time plus a
-- microsecond or 0 if none was given, and for each limit the answer and what the limit's script needs to know how much
-- of the units is still owed when they are given back.
local OPERATIONS = { acquire = 1, reserve = 2, ['at-most'] = 3, refund = 4, penalty = 5 }
local REMEMBERED, SETTLED, HEADER, ANSWER, ENTRY = 96, 112, 15, 35, 63
local operation, took, marker, options, forgets, ends
local fault
if ALGORITHMS[ARGV[at]] then
  fault = 'no count of arguments after ' .. ARGV[at]
elseif count == 0 or #ARGV >= at + 4 then
  fault = 'no known script: ' .. (ARGV[at] or '')
end
for offset, name in ipairs({ 'id_ttl', 'cost', 'mode', 'now_us' }) do
  local given = ARGV[at + offset - 1]
  if not given then
    fault = fault or 'missing ' .. name
  elseif name ~= 'mode' and not tonumber(given) then
    fault = fault or name .. ' is no number'
  end
end
if not fault then
  options = string.match(mode, '%+.*') or ''
  mode = string.sub(mode, 1, #mode - #options)
  forgets, ends = mode == 'reset' or mode == 'release', mode == 'settle' or mode == 'cancel'
  if id_ttl > 0 then marker = KEYS[#KEYS] end
  local seen = {}
  for index = 1, #KEYS do
    if seen[KEYS[index]] then fault = 'two of KEYS are alike' end
    seen[KEYS[index]] = true
  end
  if #KEYS ~= count + (id_ttl > 0 and 1 or 0) then
    fault = #KEYS .. ' KEYS for ' .. count .. (id_ttl > 0 and ' limits and a marker' or ' limits')
  elseif not (id_ttl >= 0 and id_ttl <= 2^52 and id_ttl % 1 == 0) then
    fault = 'id_ttl is out of range'
  elseif not (cost >= 0 and cost % 1 == 0 and (cost <= 2^53 or not marker)) then
    fault = 'cost is out of range'
  elseif not (now_us >= -1 and now_us <= 2^52 and now_us % 1 == 0) then
    fault = 'now_us is out of range'
  elseif ends and not marker then
    fault = mode .. ' without an id'
  elseif not (OPERATIONS[mode] or forgets or ends or mode == 'peek' or mode == 'block' or mode == 'renew') then
    fault = 'no known mode: ' .. mode
  end
end
if fault then
  return redis.error_reply('BADARG all_or_nothing: expected of each limit its script, the count of its arguments and '
    .. 'these, then id_ttl, cost, mode, now_us; ' .. string.gsub(fault, '[^ -~]', '?'))
end

local virtual = now_us >= 0
if not (forgets or ends or OPERATIONS[mode]) then marker = nil end

-- Runs one limit's script, whose writes are held back.
local function ask(limit, units, as)
  limit.writes = {}
  held = limit.writes
  local arguments = { unpack(ARGV, limit.first, limit.last) }
  for _, argument in ipairs({ units, as .. options, now_us }) do arguments[#arguments + 1] = argument end
  local done, reply = pcall(ALGORITHMS[limit.script], { limit.key }, arguments, recorder)
  if done then return reply end
  return calling and type(reply) == 'string' and refusal(reply, calling) or error(reply, 0)
end

-- Makes the writes that were held back, up to one that is refused.
local function write_all()
  for _, limit in ipairs(limits) do
    for _, write in ipairs(limit.writes) do
      local reply = redis.pcall(unpack(write))
      if type(reply) == 'table' and reply.err then return refusal(reply.err, write[1]) end
    end
  end
end

local remembered, memory
if marker and not forgets then
  memory = redis.pcall('GET', marker)
  if type(memory) == 'table' then return refusal(memory.err, 'GET') end
  local settled = false
  if memory then
    local time
    local good = #memory == HEADER + count * ENTRY
    if good then
      operation, took, time = struct.unpack('<BI7I7', memory)
      settled = operation >= SETTLED
      operation = operation - (settled and SETTLED or REMEMBERED)
      good = operation >= 1 and operation <= 5 and took <= 2^53 and time <= 2^52 + 1
      -- Only what was allowed is remembered.
      for at = HEADER + 1, #memory, ENTRY do
        local allowed, limit, remaining, retry_after, reset_after = struct.unpack('<i7i7i7i7i7', memory, at)
        local _, missing, _, refunded = struct.unpack('<i7I7I7I7', memory, at + ANSWER)
        good = good and allowed == 1 and limit <= 2^53 and remaining >= 0 and remaining <= limit
          and retry_after >= 0 and retry_after <= 2^53 and reset_after >= 0 and reset_after <= 2^53
          and missing <= 2^54 and refunded <= 2^53
      end
    end
    if not good then
      return redis.error_reply('BADSTATE all_or_nothing: the id\'s marker holds something else')
    end
    -- By the caller's own time, which Redis's expiry doesn't know.
    if virtual and time > 0 and now_us - (time - 1) >= id_ttl * 1000 then memory, operation = nil, nil end
  end
  if ends and (not operation or operation == OPERATIONS.refund) then
    return redis.error_reply('BADID all_or_nothing: nothing that was taken is remembered of this id')
  elseif operation and not ends and operation ~= OPERATIONS[mode] then
    return redis.error_reply('BADARG all_or_nothing: expected an id of its own for each operation, got one of another')
  elseif operation and (not ends or (settled and mode == 'settle')) then
    remembered = {}
    for index = 1, count do
      for field = 0, 4 do
        remembered[#remembered + 1] = struct.unpack('<i7', memory, HEADER + 1 + (index - 1) * ENTRY + field * 7)
      end
    end
    remembered[#remembered + 1] = took
  end
end

-- The same answer again, unless permits that it granted have gone since: then the call is decided anew.
if remembered then
  for _, limit in ipairs(limits) do
    if limit.script == 'concurrency' and (mode == 'acquire' or mode == 'at-most') and took > 0 then
      local reply = ask(limit, cost, 'renew')
      if reply.err then remembered = nil end
    end
  end
  if remembered then
    -- WAIT waits for what its own connection has written, on some servers (Valkey 9) for nothing else. The first call may
    -- have come by another one, so that this one writes something too: the same again.
    redis.pcall('SETRANGE', marker, '0', string.sub(memory, 1, 1))
    return write_all() or remembered
  end
  for _, limit in ipairs(limits) do limit.writes = {} end
end

-- Settling is a penalty or a refund of the difference, cancelling a refund of all.
local units, as = cost, mode
if mode == 'settle' then
  as = cost > took and 'penalty' or 'refund'
  units = math.abs(cost - took)
elseif mode == 'cancel' then
  as, units, cost = 'refund', took, 0
end

-- Of what the id's call took, a limit gives back no more than is still owed.
local entries = {}
if ends then
  for index = 1, count do
    local from = HEADER + (index - 1) * ENTRY + ANSWER + 1
    local since, missing, version, refunded = struct.unpack('<i7I7I7I7', memory, from)
    entries[index] = { since = since, missing = missing, version = version, refunded = refunded }
  end
end

local replies, allowed, granted = {}, true, cost
for index, limit in ipairs(limits) do
  local mode_of, units_of, entry = as, units, entries[index]
  if as == 'refund' and entry then
    mode_of = string.format('refund+owed=%.0f,%.0f,%.0f,%.0f,%.0f', entry.since, took, entry.missing,
      entry.version, entry.refunded)
  elseif marker and OPERATIONS[as] then
    mode_of = as .. '+remembered'
  end
  if limit.script == 'concurrency' then
    -- Permits are released, not settled: their number stays as it is until then.
    if mode == 'settle' then mode_of, units_of = 'peek', 0 end
    if mode == 'cancel' then mode_of = 'release' end
  end
  local reply = ask(limit, units_of, mode_of)
  if reply.err then return reply end
  if mode == 'settle' and limit.script == 'concurrency' then reply[1], reply[4] = 1, 0 end
  replies[index] = reply
  allowed = allowed and reply[1] == 1
  if mode == 'at-most' and reply[6] < granted then granted = reply[6] end
end

-- A call that could never be allowed blocks no key, even if another limit would make it wait.
local never = false
for _, reply in ipairs(replies) do never = never or reply[4] == -1 end
if never and string.find(options, '+block=', 1, true) then
  options = string.gsub(options, '%+block=%d+', '')
  for index, limit in ipairs(limits) do
    replies[index] = ask(limit, units, as)
  end
end

-- at-most takes from every limit what the scarcest of them can give.
if allowed and mode == 'at-most' then
  for index, limit in ipairs(limits) do
    if replies[index][6] > granted then
      replies[index] = ask(limit, granted, marker and mode .. '+remembered' or mode)
    end
  end
end

-- If another limit denies, this one's key stays untouched, and this one would still allow.
if not allowed then
  for index, limit in ipairs(limits) do
    if replies[index][1] == 1 then
      local untouched = ask(limit, cost, 'peek')
      untouched[1], untouched[4] = 1, 0
      -- A peek's reply has no `granted`, while the others' replies have one.
      if mode == 'at-most' then table.insert(untouched, 6, 0) end
      replies[index] = untouched
    end
  end
end

local refused = write_all()
if refused then return refused end

local answer, noted = {}, false
-- Only at-most replies have a sixth integer of their own.
local own = mode == 'at-most' and 6 or 5
for index, reply in ipairs(replies) do
  for field = 1, 5 do answer[index * 5 - 5 + field] = reply[field] end
  noted = noted or reply[own + 1]
end
if not allowed or mode == 'refund' or mode == 'block' or mode == 'renew' or forgets then granted = 0 end
if marker and (forgets or mode == 'cancel') then
  local reply = redis.pcall('DEL', marker)
  if type(reply) == 'table' then return refusal(reply.err, 'DEL') end
elseif marker and allowed then
  local kind = mode == 'settle' and SETTLED + operation or REMEMBERED + OPERATIONS[mode]
  local memory = struct.pack('<BI7I7', kind, granted, virtual and now_us + 1 or 0)
  for index, reply in ipairs(replies) do
    local entry = entries[index] or reply
    local missing = entry.missing or 0
    if ends and as == 'penalty' then missing = math.min(missing + units * (reply.parts or 1), 2^54) end
    memory = memory .. struct.pack('<i7i7i7i7i7', unpack(answer, index * 5 - 4, index * 5))
      .. struct.pack('<i7I7I7I7', entry.since or 0, missing, entry.version or 0, entry.refunded or 0)
  end
  local keep = virtual and math.max(id_ttl, 3600000) or id_ttl
  local reply = redis.pcall('SET', marker, memory, 'PX', string.format('%d', keep))
  if reply.err then return refusal(reply.err, 'SET') end
end
if marker or mode == 'at-most' then answer[#answer + 1] = granted end
if noted then
  for _, reply in ipairs(replies) do
    answer[#answer + 1], answer[#answer + 2] = reply[own + 1] or 0, reply[own + 2] or 0
  end
end
return answer
