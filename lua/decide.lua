-- Decides: calls of one shape, each on one or several limits: all are charged, or none. The script of a set of
-- algorithms is the text of arguments.lua, the algorithms' files by their numbers, keys.lua, and this file.
--
-- KEYS
--   of each call: the state of each of its limits, no two alike; then, if it has an id, the id's marker
--   at most 7999, as many as Lua unpacks. Text form: one call
--
-- ARGV, packed (integers by struct, little-endian)
--   [1] shape   of each limit its algorithm's number B and its numbers, as the algorithm's file lists them, perhaps
--               with options of its own after them: 64 B, the sum B of those from 1 to 8, which replace the call's,
--               and I7 us that a denial blocks its key, if 8 is among them. Then
--               operation B, options B, cost I7, and the values of the options that have one, in their order
--   [2] now_us  us  0 .. 2^52 in decimal, or -1 for the server's time, which it is without it
--   [3] calls   of each call I3, its number (as many are allowed as fit one after the other), and I7 for each limit,
--               its cost. Needed if these differ, or a key occurs twice: its later calls see what earlier ones took.
--               A number other than 1 is for acquires without options, of other limits than permits
--   [4] ...     with concurrency: each call's holder; of a cancel by receipts: each call's receipt
--   operation   128 acquire, 129 reserve, 130 at-most, 131 peek, 132 inspect, 133 refund, 134 penalty, 135 block,
--               136 settle, 137 cancel, 138 renew, 139 release, 140 reset
--   options     the sum of 1 as-is, 2 reset, 4 overage, 8 block (I7 us), 16 within (I7 us), 32 id (I7 ms that it is
--               remembered; 0: the caller keeps the receipt), 64 taken (I7 us ago; of each limit I7 us, the reset that
--               it answered), 128 long records
--
-- ARGV, text form (the first argument begins with no byte below 32)
--   one limit, in a script of one algorithm: its own arguments, cost, mode, now_us
--   several, or an id: for each limit its name and own arguments; then id_ttl (ms, 0 without an id), cost (or with
--   commas one for each limit), mode, now_us. A mode is an operation and options: reserve+overage+within=20000
--
-- Reply, packed: a record for each limit of each call, 24 bytes, or 35 if long
--   i7 remaining       units that can be taken right now, after this; of a blocked key, us until the block ends
--   i7 reset_after_us  until the key is as if never used
--   i7 retry_after_us  0: this limit doesn't deny; -1: never. Of a reservation that is allowed, the wait
--   i3 allowed         how many of the calls all limits allow; -1: the key is blocked; from -2 on nothing was taken,
--                      and a call that is alone gets an error: -2 BADSTATE or WRONGTYPE, a key or the marker holds
--                      something else; -3 STALE, retry_after_us is now; -4 a key was refused, see
--                      across_slots.lua; -5 BADID; -6 BADARG, another operation's id
--   I7 granted         units taken, as at-most and ids ask for
--   I4 overage         denials counted
--   of acquires for receipts, each call's receipt follows all records, 9 bytes and 66 for each limit: what the id's
--   marker would hold, zeros if it was denied. A cancel with it gives back what the call took; sent twice, others' too
-- Reply, text form: for each limit allowed (0 | 1), limit, remaining, retry_after_us, reset_after_us; then
--   at-most, and with an id all but peek, block and renew: granted, for each limit
--   inspect: ttl_ms (PTTL), and the state as the algorithm's file lists it
--   if a key is blocked, with +overage, and of inspect: blocked_us and overage, for each limit
--
-- Formula
--   A limit has room for a cost if used + cost <= its most units (reserve: + max_debt). All limits of a call have room,
--   or none is charged; each that has none answers how long until used <= most - cost.
--   at-most: takes of each limit what the scarcest has, of its cost at most; if that is 0, denied as an acquire of 1
--   refund: gives back the newest units. +taken, settle, cancel: at most what is still owed of those that a call took,
--           since units pass in the order in which they were taken. +taken doesn't know what was given back since
--   settle: makes `cost` the final cost of the call with this id, once; cancel gives back all, and forgets the id
--   +within: denies a reserve that would wait longer; of cost 0, retry_after_us is then until no units are owed
--   +block: blocks the keys of the limits that deny, unless one could never allow the cost, or they are blocked already
--   An allowed call with an id leaves a marker with its answer: the same id gets it again, and is charged once, while
--   the marker lasts and the permits that the call took are held; after that it is decided anew.
--
-- Source
--   Two-phase commit, within one script: first what all limits say, then the writes.
--
-- Commands
--   TIME, GET, MGET; what takes or gives: SET, SETRANGE; what leaves a key as if never used, reset, release and cancel:
--   DEL; inspect: PTTL. What a log or permits need, their files list.
--
-- Expiry
--   SET sets it to twice the longest reset, or to this reset if that is longer, plus up to a second; SETRANGE keeps it
--   while it covers this reset. With now_us at least an hour. The marker's is id_ttl.
--
-- A deny writes
--   nothing, except in four cases: a state's time lay too far ahead and is brought back to now; +overage counts it;
--   +block blocks the key; other numbers have written it, and it would expire before its reset by these: it is kept,
--   as it is, for as long as these would. Only the keys of limits that deny are written.

-- From keys.lua: `limits`, as the shape has them, and `found`, the same as a call's keys have them; `look` reads a key,
-- `save` and `prolong` write it, and `refuse` answers a whole call.

-- How long until at most so many units are in use, under the numbers that a charge would write.
local function wait_if_charged(found_limit, units)
  local limit = rewritten(found_limit)
  return limit.algorithm.wait(units, limit.x, limit.y, limit.at, limit.a, limit.b, limit.c)
end

-- How many of the calls each limit has room for (`fits`). Returns how many all allow, and whether one never could.
local function weigh(calls)
  local allowed, scarcest, never = calls, nil, false
  for n = 1, operation == 'at-most' and count or 0 do
    local room = math.max(found[n].most - found[n].used, 0)
    if room < found[n].cost then scarcest = math.max(math.min(scarcest or room, room), 1) end
  end
  for n = 1, count do
    local limit = found[n]
    local cost = math.min(limit.cost, scarcest or limit.cost)
    local bound = limit.most + (operation == 'reserve' and limit.debt or 0)
    local room = bound - limit.used
    limit.cost, limit.fits = cost, calls
    if cost > 0 and cost * calls > room then limit.fits = room >= cost and (room - room % cost) / cost or 0 end
    if option.within and operation == 'reserve' and cost > 0 and limit.fits > 0
      and wait_if_charged(limit, limit.most - cost) > option.within then
      limit.fits = 0
    end
    if limit.notes and limit.notes.blocked > now then limit.fits = 0 end
    if forced then limit.fits = calls end
    never = never or cost > bound
    allowed = math.min(allowed, limit.fits)
  end
  return allowed, never
end

-- Gives units back. Of a call that is known by its id, or by when it was and which reset it answered, what is still
-- owed of it: what came after it is known, and what others gave back is counted as if it had come before it, unless
-- all of it is still to wait.
local function give_back(n, units)
  local limit, mark, newer = found[n], marks and marks[n], 0
  local algorithm, notes = complete(limit.algorithm), limit.notes
  if mark then
    if not notes or notes.born ~= mark.born then return 0 end
    -- A state from before the call, as a replica may have that was promoted: nothing was taken of it.
    if notes.net + notes.given < mark.net + mark.given then return 0 end
    local taken_since = notes.net - mark.net
    -- Under other numbers nobody knows what was still to wait.
    local waits = algorithm.lends and limit.used - taken_since > limit.most and notes.altered == 0
      and not (limit.rule or limit.changed)
    local others = waits and 0 or math.min(notes.given - mark.given, mark.before)
    newer, units = math.max(taken_since + others, 0), math.min(units, mark.units)
  elseif option.taken_ago then
    local since, most = math.max(now - option.taken_ago, 0), nil
    local resets = now - option.taken_ago + option.taken_resets[n]
    -- What the reset says of the units that are left goes by the numbers of then.
    local altered = limit.rule or limit.changed or notes and notes.altered >= since and notes.altered > 0
    if altered or resets <= now then return 0 end
    newer, most = algorithm.after(since, resets, limit.x, limit.y, limit.at, limit.a, limit.b, limit.c)
    units = math.min(units, most)
  end
  local given
  limit.x, limit.y, limit.at, given = algorithm.give(units, newer, limit.x, limit.y, limit.at, limit.a,
    limit.b, limit.c)
  if notes then notes.net, notes.given = notes.net - given, notes.given + given end
  if mark then mark.net, mark.given, mark.units = mark.net - given, mark.given + given, mark.units - given end
  return given
end

-- Charges a limit so many units, under its own numbers. Returns the limit, and how many there was room for.
local function charge(found_limit, units)
  local limit = rewritten(found_limit)
  local addable = forced and complete(limit.algorithm).addable(limit.x, limit.y, limit.a, limit.b, limit.c) or units
  -- The cost is what is answered and remembered as taken.
  limit.cost = limit.cost - math.max(units - addable, 0)
  units = math.min(units, addable)
  -- Where there is no room for more, the state stays as it is.
  if units == 0 then
    found_limit.cost = limit.cost
    return found_limit, 0
  end
  if limit ~= found_limit or limit.changed then
    notes_of(limit).altered, limit.notes.owed = now, -1
    -- The first of several calls, which are decided at once, has ended the memory of denials under other numbers.
    if units > limit.cost and now - limit.notes.denied >= limit.longest then limit.notes.denials = 0 end
  end
  if not limit.algorithm.holds then count_units(limit, units) end
  return limit, units
end

-- What the operation does to a limit's key. Returns the limit, the units to take, and whether the key changes.
local function alter(n, units)
  local limit, mark = found[n], marks and marks[n]
  local algorithm, cost, notes = limit.algorithm, limit.cost, limit.notes
  local changed = limit.ahead
    and (limit.used > 0 or algorithm.holds or notes and (notes.blocked > 0 or notes.owed > 0))
  if not writes then return limit, 0, false end
  if operation == 'refund' then units = -cost end
  if operation == 'settle' then units = cost - mark.took end
  if operation == 'cancel' then units = -mark.took end
  if code > 137 or operation == 'block' then units = 0 end
  if algorithm.holds and forced then
    -- A settlement leaves permits as they are.
    if operation == 'settle' then limit.cost = mark.took end
    units = algorithm.hold(limit.x, operation, cost)
    changed = limit.x.give > 0 or changed
  elseif units > 0 then
    limit, units = charge(limit, units)
  elseif units < 0 then
    local before = limit.x
    changed = give_back(n, -units) > 0 or limit.x ~= before or changed
    units = 0
  end
  if operation == 'block' then
    notes_of(limit).blocked, changed = cost > 0 and now + math.min(cost, 2^51) or 0, true
  end
  return limit, units, changed
end

-- What a denial leaves behind, and how a block changes the answer. Returns it, and whether the key is to be written.
local function note(limit, denied, never, reset, retry)
  local notes, changed, option = limit.notes, false, limit.option or option
  if not denied and reset > 0 and not (notes and notes.blocked > now) then return reset, retry, false, 0 end
  -- Nothing is owed any more to whoever took units before.
  if notes and reset == 0 then notes.net, notes.given, notes.born = 0, 0, math.max(now, notes.born + 1) end
  if denied and writes and option.overage then
    notes, changed = notes_of(limit), true
    if notes.denials == 0 then notes.denied = now end
    notes.denials = math.min(notes.denials + 1, 2^32 - 1)
  end
  if denied and option.block and not never and code <= 130 and not (notes and notes.blocked > now) then
    notes, changed = notes_of(limit), true
    notes.blocked = now + math.min(option.block, 2^51)
  end
  local blocked_us = notes and math.max(notes.blocked - now, 0) or 0
  if denied and retry >= 0 then retry = math.max(retry, blocked_us) end
  return math.max(reset, blocked_us), retry, changed, blocked_us
end

local recall, remember
-- What the marker of an id holds: the operation, whether it was settled, and the caller's time plus 1, or 0 if the call
-- gave none; then for each limit the answer, what was taken, and what a later refund has to know: of how many units it
-- is, the key's counts after they were taken, and how many units were in use before them.
local MARK_WIDTH = 66
local NO_MARKER = 'BADSTATE tollgate: the id\'s marker holds something else'
local LOST = 'TRYAGAIN tollgate: a key of the call was refused'
if id_ttl then
  local keep = string.format('%d', live and id_ttl or math.max(id_ttl, 3600000))

  -- Renews the permits that a remembered call took. If they have gone since, it is decided anew.
  local function renewed(first)
    local held = {}
    for n = 1, code <= 130 and count or 0 do
      if limits[n].algorithm.holds and marks[n].took > 0 then
        held[n] = look(limits[n], nil, keys[first + n - 1])
        if not held[n] or held[n].x.kept == 0 then
          marks = nil
          return false
        end
      end
    end
    for n, limit in pairs(held) do
      save(limit, keys[first + n - 1], limit.algorithm.take(limit.x.kept, limit.x, nil, limit.at, limit.a))
    end
    return true
  end

  -- Reads what a marker says of each limit into `marks`, and answers the same again. Returns whether a call wrote it.
  local function read_marks(first, calls, held)
    local did, settled, time = unpacked('<BBI7', held)
    marks = { did = did, settled = settled, time = time }
    for n = 1, count do
      local at = 10 + MARK_WIDTH * (n - 1)
      local remaining, reset, retry, allowed, took, units, net, given, born, before =
        unpacked('<i7i7i7i3I7I7i7I7I7I7', held, at)
      local blocked = allowed == -1 and (did > 132 or settled == 1)
      if allowed < 1 and not blocked or math.min(remaining, reset, retry) < 0
        or retry > 0 and (did ~= 129 or settled == 1)
        or math.max(remaining, reset, retry, took, units, before, math.abs(net), given) > 2^53 then
        return false
      end
      marks[n] = { units = units, net = net, given = given, born = born, before = before, took = took }
      -- To who asks to take units, it was allowed, though the key was blocked when the call was settled.
      if blocked and not forced then remaining, blocked = 0, false end
      -- The limit may be lower than it was.
      if not blocked then remaining = math.min(remaining, limits[n].most) end
      local record = pack('<i7i7i7i3', remaining, reset, retry, blocked and -1 or calls)
      answers[first + n - 1] = wide and record .. pack('<I7I4', took, 0) or record
    end
    return true
  end

  -- Reads the marker of a call, or its receipt. Returns whether that answers the call.
  function recall(first, calls)
    local key, held = keys[first + count], states[first + count] or nil
    marks, receipts[ordinal] = nil, nil
    if id_ttl > 0 then answers[first + count] = '' end
    if not writes or operation == 'block' or code > 137 then return false end
    if id_ttl == 0 then
      held = operation == 'cancel' and ARGV[holders + ordinal]
    elseif not (held or known) or shared and shared[key] then
      held = redis.pcall('GET', key)
    end
    if type(held) == 'table' then
      -- Another type is the call's answer; any other refusal, such as a missing right, ends the script here.
      if not find(held.err, '^WRONGTYPE') then call('GET', key) end
      return refuse(first, held.err)
    end
    local ends = operation == 'settle' or operation == 'cancel'
    local did, settled, time = 0, 0, 0
    if held and #held == 9 + MARK_WIDTH * count then did, settled, time = unpacked('<BBI7', held) end
    if held and (did < 128 or did > 134 or settled > 1) then
      return refuse(first, NO_MARKER)
    end
    -- By the caller's own time, which Redis's expiry doesn't know.
    if held and not live and time > 0 and id_ttl > 0 and now - (time - 1) >= id_ttl * 1000 then held = false end
    if ends and (not held or did == 133) then
      return refuse(first, 'BADID tollgate: no charge is remembered for this id')
    elseif not held then
      return false
    elseif not ends and did ~= code then
      return refuse(first, 'BADARG tollgate: another operation has used this id: give each operation its own')
    end
    if not read_marks(first, calls, held) then return refuse(first, NO_MARKER) end
    if ends and (operation == 'cancel' or settled == 0) then return false end
    if not renewed(first) then return false end
    -- WAIT waits for what its own connection has written, on some servers for nothing else: the same again.
    redis.pcall('SETRANGE', key, '0', sub(held, 1, 1))
    return true
  end

  -- Remembers what an allowed call took, or forgets the id.
  function remember(first)
    local key = keys[first + count]
    if id_ttl == 0 and operation == 'cancel' then return end
    if operation == 'cancel' or operation == 'release' then return call('DEL', key) end
    if not writes or operation == 'block' or operation == 'renew' then return end
    local did, settled = code, 0
    if operation == 'settle' then did, settled = marks.did, 1 end
    local memory = pack('<BBI7', did, settled, live and 0 or now + 1)
    for n = 1, count do
      local limit, mark = found[n], marks and marks[n]
      local notes, cost = limit.notes or { net = 0, given = 0, born = 0 }, limit.cost
      local took = operation == 'refund' and 0 or cost
      local units, net, given, born, before = took, notes.net, notes.given, notes.born, limit.used
      -- Where nothing is used, what another call takes next isn't counted from here.
      if limit.used == 0 and took == 0 then born = 0 end
      if limit.algorithm.counted then before = limit.algorithm.counted(limit.x, limit.y) end
      if mark then
        local more = took - mark.took
        if more <= 0 then
          units, net, given, born, before = mark.units, mark.net, mark.given, mark.born, mark.before
        elseif mark.born == born then
          -- What a settlement took belongs to the end of what the call had taken.
          units, net, given, before = mark.units + more, mark.net + more, mark.given, mark.before
        else
          units = more
        end
        units = math.min(units, took)
      end
      memory = memory .. sub(answers[first + n - 1], 1, 24)
        .. pack('<I7I7i7I7I7I7', took, units, net, given, born, before)
    end
    if id_ttl > 0 then return call('SET', key, memory, 'PX', keep) end
    receipts[ordinal] = memory
  end
end

for n = 1, reads and writes and operation ~= 'block' and operation ~= 'reset' and count or 0 do
  for nth = 0, limits[n].algorithm.holds and #keys / width - 1 or -1 do
    if (ARGV[holders + nth] or '') == '' then return redis.error_reply('BADARG concurrency: expected a holder') end
  end
end
for first = 1, operation == 'reset' and #keys or 0, width do
  if not call('DEL', unpack(keys, first, first + width - 1)) then refuse(first, LOST) end
  for n = 1, width do
    local index, limit = first + n - 1, limits[n]
    answers[index] = answers[index] or not limit and ''
      or pack('<i7i7i7i3', limit.most, 0, 0, 1) .. (wide and pack('<I7I4', 0, 0) or '')
  end
end

-- Call by call. First all limits are asked: `limit.fits` is how many calls one has room for, and `allowed` is the
-- fewest of any. Then each limit is charged for so many calls, is written, and answers. Of a single call both are 1 or
-- 0. Say it costs 3, the first limit has 5 units left, and the second one 2: their `fits` are 1 and 0, so `allowed` is
-- 0, and both are charged 0 units. The first one answers what remains, and no wait; the second one is `denied`, and
-- answers how long until no more than its most units less 3 are used. Neither is written. What a plain call in the
-- server's time comes to is the same, and keys.lua has answered it before.
for first = 1, #keys, width do
  -- What its keys come to, and how many of the calls (one, unless they are listed) all limits allow. `done`: a refusal
  -- or its id's marker has answered it; `lost`: a write was refused.
  local calls, listed_at, readable, never, lost = 1, (first - 1) / width * each_width + 1, true, false, false
  if each then calls = unpacked('<I3', each, listed_at) end
  ordinal = (first - 1) / width
  local allowed, done = calls, answers[first] or (recall and recall(first, calls))
  for n = 1, done and 0 or count do
    local limit, held, why = limits[n], states[first + n - 1], nil
    if each then limit.cost = unpacked('<I7', each, listed_at + 7 * n - 4) else limit.cost = common end
    if operation == 'cancel' then limit.cost = 0 end
    -- An earlier call may have taken of it.
    if shared and shared[keys[first + n - 1]] then held = nil end
    found[n], why = look(limit, held, keys[first + n - 1])
    if not found[n] then
      local name = limits[n].algorithm.name
      readable, fault = false, why or 'BADSTATE ' .. name .. ': the key holds something other than this limit\'s state'
    end
  end
  if not done and readable then allowed, never = weigh(calls) end
  for n = 1, readable and operation == 'renew' and count or 0 do
    if found[n].algorithm.holds and found[n].x.kept == 0 then
      done = refuse(first, 'BADID concurrency: no permit is held by this id')
    end
  end
  if not readable then refuse(first, fault) end
  -- Before it gives anything back: made again after an error, it would give back what others took.
  if operation == 'cancel' and readable and not done then lost = remember(first) == false end
  -- What that takes of each, and the answer.
  for n = 1, (done or lost or not readable) and 0 or count do
    local limit, index = found[n], first + n - 1
    local units, changed, retry, writes_note, blocked_us = allowed * limit.cost, false, 0, false, 0
    -- Those that have room for the fewest deny; the others answer that they would allow it.
    local denied = allowed < calls and limit.fits <= allowed
    limit, units, changed = alter(n, units)
    -- A limit with room for a call that another denies isn't written, not even to bring its time back.
    changed = changed and (denied or allowed > 0 or allowed == calls)
    found[n] = limit
    local algorithm, most, cost, a, b, c = limit.algorithm, limit.most, limit.cost, limit.a, limit.b, limit.c
    local x, y, at, used, reset = algorithm.take(units, limit.x, limit.y, limit.at, a, b, c)
    if operation == 'reserve' and units > 0 then
      retry = algorithm.wait(most - cost, limit.x, limit.y, limit.at, a, b, c)
    end
    if denied then
      local room = most - cost + (operation == 'reserve' and limit.debt or 0)
      if cost > 0 then retry = room < 0 and -1 or algorithm.wait(room, x, y, at, a, b, c) end
      if option.within and cost > 0 and retry == 0 then
        local wait = wait_if_charged(limit, most - cost)
        retry = wait > option.within and wait or 0
      end
    end
    local remaining, written = used < most and most - used or 0, nil
    local expires_early = denied and writes and live and limit.held and (limit.changed or algorithm.window)
      and limit.armed * 1000000 < now + reset
    reset, retry, writes_note, blocked_us = note(limit, denied, never, reset, retry)
    if option.within and cost == 0 and not denied and (code == 129 or code == 131) and used > most then
      retry = algorithm.wait(most, x, y, at, a, b, c)
      if complete(algorithm).spare then remaining = math.min(algorithm.spare(used - most, a), most) end
    end
    if units > 0 or changed or writes_note then
      -- What an earlier call's reset says of its units went by other numbers.
      if limit.changed and used > 0 then notes_of(limit).altered, limit.notes.owed = now, -1 end
      written = save(limit, keys[index], x, y, at, used, reset)
    elseif expires_early then
      written = prolong(limit, keys[index], reset)
    end
    lost = lost or written == false
    local answer
    if blocked_us > 0 then
      answer = pack('<i7i7i7i3', blocked_us, reset, retry, -1)
    else
      answer = pack('<i7i7i7i3', remaining, reset, retry, allowed)
    end
    if wide then
      answer = answer .. pack('<I7I4', allowed * cost, limit.notes and limit.notes.denials or 0)
    end
    answers[index] = answer
  end
  if id_ttl and operation ~= 'cancel' and not (done or lost) and readable and allowed == calls then
    lost = remember(first) == false
  end
  if lost then refuse(first, LOST) end
end

if packed and operation ~= 'inspect' and not (fault and #keys == width) then return answered() end
if fault then return redis.error_reply(fault) end

-- The text form's reply: five integers for each limit, then what the operation or an option adds.
local reply, granted, denials_of = {}, {}, {}
local ignores_id = not writes or operation == 'block' or operation == 'renew'
local grants, blocked = operation == 'at-most' or id_ttl and not ignores_id, false
for n = 1, count do
  local remaining, reset, retry, allowed, took, denials = unpacked('<i7i7i7i3I7I4', answers[n])
  local blocked_us = allowed == -1 and remaining or 0
  if allowed == -1 then remaining = 0 end
  if allowed < 1 and (retry == 0 or forced) then allowed = 1 end
  for field, number in ipairs({ math.max(allowed, 0), limits[n].most, remaining, retry, reset }) do
    reply[5 * n - 5 + field] = number
  end
  granted[n], blocked = took, blocked or blocked_us > 0
  denials_of[2 * n - 1], denials_of[2 * n] = blocked_us, denials
end
for n = 1, grants and count or 0 do reply[#reply + 1] = granted[n] end
if operation == 'inspect' then
  reply[#reply + 1] = call('PTTL', keys[1])
  local limit, algorithm = found[1], limits[1].algorithm
  local fields = algorithm.inspect and algorithm.inspect(limit.held, limit)
  if not fields then
    local held = limit.held or pack(algorithm.front, limit.at, limit.x, limit.y) .. '\0\0\0\0\0' .. limit.numbers
    fields = { unpacked(algorithm.front, held) }
    local stored = { unpacked(algorithm.stored, held, algorithm.numbers_at) }
    -- The last that `unpacked` returns is where it ended; the first number is the algorithm's.
    table.remove(fields)
    for place = 2, #stored - 1 do fields[#fields + 1] = stored[place] end
  end
  for _, field in ipairs(fields) do reply[#reply + 1] = field end
end
for n = 1, (blocked or option.overage or operation == 'inspect') and #denials_of or 0 do
  reply[#reply + 1] = denials_of[n]
end
return reply
