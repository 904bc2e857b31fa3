-- Keys: reads the shape, and reads and writes what the keys of its limits hold. It follows the algorithms' files;
-- decide.lua comes next, and describes KEYS, ARGV, the reply, and what is written when.
--
-- A state
--   what the algorithm writes, its time first; the second at which the key expires, I5, 0 if that isn't known; the
--   algorithm's number and the numbers under which it was written; and, of few keys, what is noted beside (NOTED)
--
-- Other numbers than the state's
--   What is used stays used, also above a smaller capacity. Of both versions' numbers those apply that let units pass
--   faster (equal ones: the state's), until a call that takes units writes the state under its own. So nothing is
--   forgiven, and a denial needn't write. +as-is: what remained remains; +reset: nothing is used.
--
-- Another clock
--   A state's time that lies ahead of now counts as now, if by no more than the longest reset; waits include the gap.
--   Further ahead, the state is brought back to now with its usage kept.

local text_fault = to_shape and to_shape()
if text_fault then return redis.error_reply(text_fault) end

-- A limit of the shape: its algorithm; the most units that it admits, the rest of its numbers (a, b, c), and all as a
-- state has them (`numbers`); its longest reset, how long a state is kept, its debt, and options of its own (`option`,
-- in place of the call's of that name). Then what a call asks of it
-- (`cost`), and what it finds at its key: the units in use, the state as the algorithm's functions pass it on (x, y),
-- as of when that is (`at`), the second at which it expires (`armed`), its own time, and how many calls there is room
-- for (`fits`).
local limits, count, place, layout, reads, stale, own = {}, 0, 1, byte(shape), false, nil, false
while layout and layout < 128 do
  local algorithm = ALGORITHMS[layout]
  if not algorithm or #shape < place + algorithm.size then
    return redis.error_reply('BADARG tollgate: expected a shape of this script\'s algorithms')
  end
  local _, most, a, b, c, debt = unpacked(algorithm.format, shape, place)
  local numbers, longest, kept = sub(shape, place, place + algorithm.width - 1), nil, nil
  if not algorithm.lends then debt = 0 end
  if algorithm.window then a, b, c, numbers = algorithm.window(most, a, b, c) end
  if not numbers then stale = algorithm.stale end
  longest, kept = algorithm.spans(most, debt, a, b, c)
  if not longest then return redis.error_reply('BADARG ' .. algorithm.name .. ': expected numbers in range') end
  count, reads = count + 1, algorithm.holds and algorithm or reads or algorithm.read and algorithm
  -- Sixteen fields, as many as a table has room for before it doubles.
  limits[count] = { algorithm = algorithm, most = most, a = a, b = b, c = c or 0, numbers = numbers, longest = longest,
    kept = kept, cost = 0, used = 0, x = 0, y = 0, at = 0, armed = 0, time = 0, fits = 0 }
  if debt > 0 then limits[count].debt = debt end
  place = place + algorithm.size
  layout = byte(shape, place)
  if layout == 64 and #shape >= place + 8 then
    local bits, block = unpacked('<BI7', shape, place + 1)
    limits[count].option = { as_is = bits % 2 >= 1, afresh = bits % 4 >= 2, overage = bits % 8 >= 4,
      block = bits >= 8 and block }
    place, own = place + 9, own or bits >= 4
    layout = bits < 16 and byte(shape, place) or 0
  end
end
if #shape < place + 8 then return redis.error_reply('BADARG tollgate: expected an operation after the limits') end
if not (now >= 0 and now <= 2^52 and now % 1 == 0) then
  return redis.error_reply('BADARG tollgate: now_us is out of range')
end
local code, options, common = unpacked('<BBI7', shape, place)
local operation = code == 128 and 'acquire' or ({ 'reserve', 'at-most', 'peek', 'inspect', 'refund', 'penalty', 'block',
  'settle', 'cancel', 'renew', 'release', 'reset' })[code - 128]
-- A reset repairs, whatever the time.
if stale and operation ~= 'reset' then return redis.error_reply(string.format(stale, now)) end
local option, wide, id_ttl = {}, options >= 128, nil
if options % 128 == 32 then
  place = place + 7
  id_ttl = #shape == place + 8 and unpacked('<I7', shape, place + 2) or 0
elseif options % 128 > 0 then
  -- Options with a value are followed by it, in this order.
  local function value(bit)
    if options % (2 * bit) < bit then return nil end
    place = place + 7
    return place + 8 <= #shape and unpacked('<I7', shape, place + 2) or 0
  end
  option = { as_is = options % 2 >= 1, afresh = options % 4 >= 2, overage = options % 8 >= 4, block = value(8),
    within = value(16), id_ttl = value(32), taken_ago = value(64), taken_resets = {} }
  for n = 1, option.taken_ago and count or 0 do option.taken_resets[n] = value(64) end
  id_ttl = option.id_ttl
end
if options % 128 > 0 and #shape ~= place + 8 then
  return redis.error_reply('BADARG tollgate: expected the values of these options, of taken one more for each limit')
end
-- Reservations need limits that lend, permits are renewed and released, and an id's call is settled and cancelled.
local unknown = not operation or (code == 136 or code == 137) and not id_ttl or code == 132 and not wide
  or id_ttl == 0 and (code ~= 128 and code ~= 137 or reads and reads.holds)
for n = 1, code > 128 and count or 0 do
  local algorithm = limits[n].algorithm
  unknown = unknown or code == 129 and not algorithm.lends
    or (code == 138 or code == 139) and not (reads and reads.holds)
end
if unknown then
  return redis.error_reply('BADARG ' .. limits[1].algorithm.name .. ': expected an operation of these limits, or an id')
end
local width, each_width = count + ((id_ttl or 0) > 0 and 1 or 0), 3 + 7 * count
if #keys == 0 or #keys % width > 0 or (each and #each * width ~= each_width * #keys) then
  return redis.error_reply('BADARG tollgate: expected KEYS and costs for each limit of each call')
end
-- A denial that blocks hides which calls before it were allowed, each counted denial counts, and a holder's calls are
-- one: these go one by one.
local plainly = code == 128 and options % 128 == 0 and not own and not (reads and reads.holds)
for at = 1, each and not plainly and #each or 0, each_width do
  if unpacked('<I3', each, at) ~= 1 then
    return redis.error_reply('BADARG tollgate: expected a number of 1 for each call, but for plain acquires')
  end
end

-- What is noted of a key beside its level, after its numbers: the units taken less those given back, those given back,
-- when both counts began, the last change of numbers, and until when units may be owed that need these four; until when
-- it is blocked; since when denials are counted, and how many.
local NOTED = '<i7I7I7I7I7I7I7I4'

local writes, forced = code ~= 131 and code ~= 132, code > 132
-- A call that is alone reads by GET, which tells what is of another type. MGET answers nothing for it.
local known = #keys == width and not reads
if not (states or known or reads) then states = call('MGET', unpack(keys)) end
states = states or {}
for index = #states + 1, known and operation ~= 'reset' and width or 0 do
  states[index] = redis.pcall('GET', keys[index])
end

-- The short way of plain calls, which most are, in the server's time: acquires, perhaps with an id, peeks, and those
-- reserves, at-mosts and penalties that there is room for; of keys that hold nothing or what calls of these numbers
-- wrote, neither blocked nor with counted denials. What follows would answer the same, but only to define its functions
-- costs as much.
local plain, left = (code <= 131 or code == 134) and (writes or not id_ttl) and live and not reads, false
-- Of each call that asks for a receipt, what its id's marker would hold.
local receipts = {}
-- Whether all calls have the usual number and costs, so that they needn't be read.
local usual = each and string.rep(pack('<I3', 1) .. string.rep(pack('<I7', common), count), #keys / width) == each
-- Of a shared key, what it comes to, call by call, and the second at which it is to expire, if that changes: it is
-- written once.
local current, expiring, remembered = {}, {}, id_ttl and string.format('%d', id_ttl)
local unnoted = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'
for first = 1, plain and #keys or 0, width do
  local calls, units, asked, fits, listed_at = 1, common, not answers[first], true, (first - 1) / width * each_width + 1
  local marker = width > count and states[first + count]
  if each and not usual then calls = unpacked('<I3', each, listed_at) end
  for n = 1, asked and count or 0 do
    local limit, index = limits[n], first + n - 1
    local algorithm, numbers, held = limit.algorithm, limit.numbers, current[keys[index]] or states[index]
    if not (held or known) then held = redis.pcall('GET', keys[index]) end
    states[index] = held
    if each and not usual then units = unpacked('<I7', each, listed_at + 7 * n - 4) end
    local at, ends, used, time = algorithm.numbers_at, held and #held - #numbers + 1, nil, nil
    if not held or (ends == at or id_ttl and ends == at + 53 and sub(held, -18) == unnoted)
      and find(held, numbers, at, true) == at then
      used, limit.x, limit.y, limit.at, limit.armed, time =
        algorithm.level(held, now, limit.longest, limit.a, limit.b, limit.c)
    end
    local room = used and used + units * calls <= limit.most
    -- A denial of several calls, or one that is written, isn't plain.
    if not used or time and time > now or units == 0 or not room and (calls > 1 or units > limit.most
      or writes and code > 128 or (limit.option or option).overage or (limit.option or option).block
      or algorithm.window and limit.armed * 1000000 < limit.b) then
      asked, left = false, true
      break
    end
    limit.used, limit.cost, limit.fits, fits = used, units, room, fits and room
  end
  if width > count and asked and not (marker or known) then marker = redis.pcall('GET', keys[first + count]) end
  if marker and asked then asked, left = false, true end
  -- What an earlier call will take of its keys is still to be seen.
  if left and shared then break end
  local memory, lost = string.char(code) .. '\0\0\0\0\0\0\0\0', false
  for n = 1, asked and count or 0 do
    local limit, index = limits[n], first + n - 1
    local algorithm, held, granted, retry = limit.algorithm, states[index], fits and limit.cost * calls or 0, 0
    local took = writes and granted or 0
    local x, y, at, used, reset = algorithm.take(took, limit.x, limit.y, limit.at, limit.a, limit.b, limit.c)
    if not limit.fits then retry = algorithm.wait(limit.most - limit.cost, x, y, at, limit.a, limit.b, limit.c) end
    local net, given, born, altered, state, noted = 0, 0, now, 0, took > 0 and pack(algorithm.front, at, x, y), ''
    if took > 0 and id_ttl then
      -- As `count_units` and `save` have it.
      local noted_at = algorithm.numbers_at + #limit.numbers
      if held and #held > noted_at then net, given, born, altered = unpacked('<i7I7I7I7', held, noted_at) end
      if limit.used == 0 or net + given + took > 2^53 then net, given, born = 0, 0, math.max(now, born + 1) end
      net = net + took
      local owed = math.max(math.max(at, now) + limit.longest, now + reset)
      noted = pack('<i7I7I7I7I7', net, given, born, altered, owed) .. unnoted
      local before = algorithm.counted and algorithm.counted(limit.x, limit.y) or limit.used
      marker = pack('<I7I7i7I7I7I7', took, took, net, given, born, before)
    end
    if state then
      local armed, latest, key, written = limit.armed, now + (reset > limit.kept and reset or limit.kept), keys[index]
      local covered = held and armed * 1000000 >= now + reset and armed * 1000000 <= latest + 1000000
      if not covered then armed = (latest + 1000000 - latest % 1000000) / 1000000 end
      local again = shared and shared[key]
      if not covered or id_ttl or again then state = state .. pack('<I5', armed) .. limit.numbers .. noted end
      if again then
        current[key], expiring[key], written = state, not covered and armed or expiring[key], true
      elseif covered then
        written = call('SETRANGE', key, '0', state)
      else
        written = call('SET', key, state, 'PXAT', string.format('%d', armed * 1000))
      end
      lost = lost or not written
    end
    local answer = pack('<i7i7i7i3', used < limit.most and limit.most - used or 0, reset, retry, fits and calls or 0)
    if id_ttl and fits then memory = memory .. answer .. marker end
    answers[index] = wide and answer .. pack('<I7I4', granted, 0) or answer
  end
  if width > count and asked then
    answers[first + count] = ''
    if fits and not lost then
      lost = not call('SET', keys[first + count], memory, 'PX', remembered)
    end
  elseif id_ttl and asked and fits then
    receipts[(first - 1) / width] = memory
  end
  -- A key was refused (across_slots.lua): what follows tells.
  if lost then answers[first], left = nil, true end
end
for key, state in pairs(current) do
  local armed = expiring[key]
  local written = not armed and call('SETRANGE', key, '0', state)
    or armed and call('SET', key, state, 'PXAT', string.format('%d', armed * 1000))
  for index = 1, written and 0 or #keys do
    if keys[index] == key then answers[index - (index - 1) % width], left = nil, true end
  end
end
-- The records, and the receipts.
local function answered()
  if id_ttl ~= 0 or code ~= 128 then return table.concat(answers) end
  for nth = 0, #keys / width - 1 do
    answers[#keys + 1 + nth] = receipts[nth] or string.rep('\0', 9 + 66 * count)
  end
  return table.concat(answers)
end
if plain and packed and not left then return answered() end

-- Writes what a key comes to: in place while its expiry covers that, else whole with a new one. Its first write is one
-- that Redis refuses if it is out of memory, unless nothing is left to keep. Returns false if it was
-- refused, which ends the script unless across_slots.lua precedes it.
local function save(limit, key, x, y, at, used, reset)
  local algorithm, held, notes, tail = limit.algorithm, limit.held, limit.notes, ''
  -- In server time, a key that is as if never used is forgotten with its counts, if a later one is born after it: `note`
  -- has made `born` one more than it was, and a new key's is now + 1.
  local gone = live and used == 0 and notes and notes.born <= now + 1
  local counts = notes and not gone and (notes.owed < 0 or limit.used > 0 and now < notes.owed)
  if notes and (counts or notes.blocked > now or notes.denials > 0) then
    -- None of the counted units can still be owed: the counts begin anew.
    if not counts then
      notes.net, notes.given, notes.altered = 0, 0, 0
      if notes.owed > 0 then notes.born, notes.owed = notes.born + 1, 0 end
    end
    if notes.owed < 0 then notes.owed = math.max(math.max(at, now) + limit.longest, now + reset) end
    tail = pack(NOTED, notes.net, notes.given, notes.born, notes.altered, notes.owed,
      notes.blocked > now and notes.blocked or 0, notes.denied, notes.denials)
    if notes.denials > 0 then reset = math.max(reset, notes.denied + limit.longest - now) end
  end
  if used == 0 and tail == '' then
    if held then return call('DEL', key) end
    return
  end
  local latest, armed = now + (reset > limit.kept and reset or limit.kept), limit.armed * 1000000
  local covered = live and held and armed >= now + reset and armed <= latest + 1000000
  local seconds, option, expires = limit.armed, nil, nil
  if not covered and live then
    seconds, option = (latest + 1000000 - latest % 1000000) / 1000000, 'PXAT'
    expires = string.format('%d', seconds * 1000)
  elseif not covered then
    -- At a time that isn't the server's: at least an hour, and the next call in server time arms it anew.
    seconds, option = 0, 'PX'
    expires = string.format('%d', math.max(3600000, (latest - now + -(latest - now) % 1000) / 1000))
  end
  if algorithm.write then return algorithm.write(limit, key, x, y, at, used, seconds, option, expires, tail) end
  local front = pack(algorithm.front, at, x, y)
  local state = front .. pack('<I5', seconds) .. limit.numbers .. tail
  if covered and #held <= #state then return call('SETRANGE', key, '0', state) end
  if covered then return call('SET', key, state, 'KEEPTTL') end
  return call('SET', key, state, option, expires)
end

-- Keeps a state that other numbers have written, as it is, for as long as this call's numbers would.
local function prolong(limit, key, reset)
  local held, at, latest = limit.held, limit.algorithm.numbers_at - 5, now + math.max(reset, limit.kept)
  local seconds = (latest + 1000000 - latest % 1000000) / 1000000
  local armed, expires = pack('<I5', seconds), string.format('%d', seconds * 1000)
  if limit.algorithm.prolong then return limit.algorithm.prolong(key, armed, expires) end
  return call('SET', key, sub(held, 1, at - 1) .. armed .. sub(held, at + 5), 'PXAT', expires)
end

-- What is noted of a key, begun anew if nothing is.
local function notes_of(limit)
  limit.notes = limit.notes
    or { net = 0, given = 0, born = now, altered = 0, owed = 0, blocked = 0, denied = 0, denials = 0 }
  return limit.notes
end

-- What is noted of a key, from the bytes at its end, if its time lay so far ahead that it was brought back, and if
-- the key counts so many more units than were taken; nothing if it can't be read. `memory`: how long denials count.
local function noted_in(limit, tail, memory, ahead, more)
  local net, given, born, altered, owed, blocked, denied, denials = unpacked(NOTED, tail)
  local since = limit.algorithm.window and limit.a or now - memory + 1
  if blocked > 2^53 or net > 2^53 then return nil end
  -- 1: over, though it was written with the state that is brought back.
  if ahead and blocked > 0 then blocked = math.max(blocked - ahead, math.min(now, 1)) end
  if now < denied or denied < since then denials = 0 end
  return { net = math.min(net + more, 2^53), given = given, born = born, altered = altered, owed = owed,
    blocked = blocked, denied = denied, denials = denials }
end

-- Counts units that are taken, of a key of which that is noted or that an id takes them of.
local function count_units(limit, units)
  local notes = id_ttl and notes_of(limit) or limit.notes
  -- Where nothing was used, nothing is owed any more to whoever took units before; nor what can't be counted.
  if notes and (limit.used == 0 or notes.net + notes.given + units > 2^53) then
    notes.net, notes.given, notes.born = 0, 0, math.max(now, notes.born + 1)
  end
  if notes then notes.net = notes.net + units end
  if id_ttl then notes.owed = -1 end
end

-- The limits as the call's keys have them; what the marker of its id remembers of each; why a key or an id is refused.
local found, marks, fault = {}, nil, nil
-- Answers a whole call alike: each record has the reason's code in place of the count of calls that are allowed.
local CODES = { BADSTATE = -2, WRONGTYPE = -2, STALE = -3, BADID = -5, BADARG = -6 }
local function refuse(first, why)
  local code = CODES[string.match(why, '^%u+')] or -4
  fault = why
  for n = 1, count do
    local record = pack('<i7i7i7i3', 0, 0, code == -3 and now or 0, code)
    answers[first + n - 1] = wide and record .. pack('<I7I4', 0, 0) or record
  end
  return true
end

-- The functions of an algorithm that few calls need.
local function complete(algorithm)
  if algorithm.rare and not algorithm.give then algorithm.rare(algorithm) end
  return algorithm
end

-- The limit with the state under its own numbers, as a charge writes it.
local function rewritten(limit)
  local rule = limit.rule
  if not (rule or limit.changed) then return limit end
  if rule then
    rule.x, rule.y, rule.at = complete(limit.algorithm).convert(limit.x, limit.y, limit.at, limit.a, limit.b, limit.c,
      rule.a, rule.b, rule.c)
    rule.used, rule.cost, rule.armed, rule.time, rule.fits, rule.held, rule.notes = limit.used, limit.cost,
      limit.armed, limit.time, limit.fits, limit.held, limit.notes
  else
    -- A copy: whoever only asks for a wait goes on with the state as it is.
    rule = {}
    for name, value in pairs(limit) do rule[name] = value end
  end
  -- By this limit's clock, which may have ticked since, and its longest reset, beyond which no time lies ahead.
  local state = rule.x
  if rule.algorithm.front then
    state = pack(rule.algorithm.front, rule.at, rule.x, rule.y) .. pack('<I5', rule.armed)
  elseif rule.at - now <= rule.longest then
    return rule
  end
  rule.used, rule.x, rule.y, rule.at = rule.algorithm.level(state, now, rule.longest, rule.a, rule.b, rule.c)
  return rule
end

-- A state under other numbers. What is used passes at the faster of both rates, equal ones as the state has it,
-- until a call takes units and writes it under its own numbers. Returns the limit, under the numbers that apply, and
-- how many units more are used than were; nothing if it can't be read. Until then `rule` is the call's own limit.
local function other_version(limit, held, numbers)
  local algorithm, most, a, b, c = complete(limit.algorithm), limit.most, limit.a, limit.b, limit.c
  local option = limit.option or option
  local _, was_most, was_a, was_b, was_c = unpacked(algorithm.stored, numbers)
  local longest, _, was_rate = algorithm.spans(was_most, 0, was_a, was_b, was_c)
  if not longest then return nil end
  local _, _, rate = algorithm.spans(most, 0, a, b, c)
  local used, x, y, at, armed = algorithm.level(held, unpacked('<I7', held), longest, was_a, was_b, was_c)
  if not used then return nil end
  longest = math.max(longest, limit.longest)
  if not (option.as_is or option.afresh) and (was_rate >= rate or algorithm.bounded and used > most) then
    local version = { algorithm = algorithm, most = most, a = was_a, b = was_b, c = was_c, numbers = numbers,
      longest = longest, kept = limit.kept, debt = limit.debt, cost = limit.cost, held = held, rule = limit,
      option = limit.option }
    version.used, version.x, version.y, version.at, version.armed, version.time =
      algorithm.level(held, now, longest, was_a, was_b, was_c)
    return version, 0, longest
  end
  -- Also what is owed stays owed.
  local target = option.afresh and 0 or option.as_is and used > 0 and math.max(most - was_most + used, 0) or used
  local more = target - used
  x, y, at = algorithm.convert(x, y, at, was_a, was_b, was_c, a, b, c)
  if more ~= 0 and algorithm.counted then
    -- Counts by their weight: all are taken back, and what is to be used is put in the current window.
    x, y = algorithm.give(2^53, 0, x, y, at, a, b, c)
    more = math.min(target, algorithm.addable(x, y, a, b, c))
    x, y, at = algorithm.take(more, x, y, at, a, b, c)
  elseif more ~= 0 then
    local whole, units = algorithm.addable(0, y, a, b, c), more
    if math.min(used, whole) + more > whole then
      x, y = algorithm.give(2^53, 0, x, y, at, a, b, c)
      units, more = whole, math.max(whole - used, 0)
    end
    x, y = algorithm.give(-units, 0, x, y, at, a, b, c)
  end
  local state = pack(algorithm.front, at, x, y) .. pack('<I5', armed)
  limit.used, limit.x, limit.y, limit.at, limit.armed, limit.time = algorithm.level(state, now, longest, a, b, c)
  limit.changed = true
  return limit, math.max(more, 0), longest
end

-- What a key holds: the state, the numbers that it was written under, and what is noted of it; or nothing, and
-- Redis's refusal of another type.
local function contents(limit, held, key)
  local algorithm, at = limit.algorithm, limit.algorithm.numbers_at
  local numbers, tail = limit.numbers, ''
  if algorithm.read then
    held, numbers, tail = algorithm.read(limit, key)
  elseif not held and not known then
    held = redis.pcall('GET', key)
  end
  if type(held) == 'table' and held.err then
    -- Any other refusal, such as a missing right, ends the script.
    if not find(held.err, '^WRONGTYPE') then call('GET', key) end
    return nil, nil, nil, held.err
  elseif held and not algorithm.read then
    if find(held, numbers, at, true) ~= at then numbers = sub(held, at, at + algorithm.width - 1) end
    if #held >= at + algorithm.width then tail = sub(held, at + algorithm.width) end
  end
  return held, numbers, tail
end

-- What a key holds, whatever that is, and what it comes to. Returns the limit as this key has it; nothing, and the
-- reason, if it holds something else.
local function look(limit, held, key)
  local algorithm, more, longest, ahead = limit.algorithm, 0, limit.longest, nil
  local numbers, tail, wrong_type
  held, numbers, tail, wrong_type = contents(limit, held, key)
  if wrong_type then return nil, wrong_type end
  if held and (byte(numbers) ~= byte(limit.numbers) or #numbers ~= #limit.numbers
    or (tail ~= '' and #tail ~= 53)) then
    return nil
  end
  limit.held, limit.notes, limit.changed = held, false, false
  if held and algorithm.other then
    local own = limit.option or option
    local version, used, x, y, at, armed, time, far = algorithm.other(limit, held, numbers, own.as_is, own.afresh)
    if not version then return nil, used end
    limit, longest, ahead = version, version.longest, far
    limit.used, limit.x, limit.y, limit.at, limit.armed, limit.time = used, x, y, at, armed, time
  elseif held and numbers ~= limit.numbers then
    limit, more, longest = other_version(limit, held, numbers)
  else
    limit.used, limit.x, limit.y, limit.at, limit.armed, limit.time =
      algorithm.level(held, now, longest, limit.a, limit.b, limit.c)
  end
  if not limit or not limit.used then return nil end
  local memory = limit.longest
  if limit.rule and limit.used == 0 then
    -- Nothing is left that passes under the state's numbers.
    local rule, armed, time = limit.rule, limit.armed, limit.time
    rule.used, rule.x, rule.y, rule.at = algorithm.level(nil, now, longest, rule.a, rule.b, rule.c)
    rule.armed, rule.time, rule.changed = armed, time, true
    limit = rule
  end
  if held and limit.time and limit.time - now > longest then ahead = limit.time - now end
  limit.ahead = ahead
  if held and tail ~= '' then
    limit.notes = noted_in(limit, tail, memory, ahead, more)
    if not limit.notes then return nil end
  end
  return limit
end
