-- sliding_window_log: admits exactly `limit` units in any `period`.
--
-- Numbers
--   limit   units  1 .. 2^39
--   period  us     1 .. 2^51
--   packed: BI5I7: 5, these
--
-- State; inspect lists newest, count, units used, oldest, limit, period
--   newest I7 us, total I5, head I4, count I4, base I5, oldest I7 us, expiry I5 s, slots I4, the numbers; then a ring
--   of so many slots of a time I7 us and a total I5; then what keys.lua notes. `head` is the slot after the newest.
--
-- Formula
--   The log is a ring of entries, oldest first: a time, and the units taken up to and including it (a running total
--   modulo 2^40). Units of one microsecond share an entry. An entry `period` old no longer counts.
--   used = total - total at the last entry that no longer counts; a cost is admitted if used + cost <= limit
--   wait   until at most u units are used: until the entry leaves by which used - u units had been taken
--   Units that are given back leave with the newest entries, or with the oldest if others took the newest: no sooner.
--   Under another period, what is used moves to one entry, at the time of the newest.
--   Reads O(1) entries where few have expired since the last write, else O(log n); writes one, or a short log whole.
--
-- Source
--   The sliding log of Figma, "An alternative approach to rate limiting", 2017, with costs.
--
-- Commands
--   GETRANGE, EXISTS, STRLEN; what takes or gives: SET, SETRANGE, PEXPIRE, PEXPIREAT

-- One read brings the header and, of a short log, all entries.
local HEADER, ENTRY, NEAR, MODULUS = 54, 12, 264, 2^40

-- The i-th entry from the oldest: its time and total. Reads eight at once: the next one is usually needed next.
local function entry_of(log, i)
  local place = HEADER + (log.head - log.count + i) % log.slots * ENTRY
  if place < log.offset or place + ENTRY > log.offset + #log.text then
    log.text, log.offset = call('GETRANGE', log.key, string.format('%d', place), string.format('%d', place + 95)), place
  end
  return unpacked('<I7I5', log.text, place - log.offset + 1)
end

-- The first entry from `first` on that is younger than `cutoff` and by which `enough` units had been taken, by doubling
-- steps and then by bisection; the newest is known to be one. Returns its index, its time, and the total before it.
local function search(log, cutoff, enough)
  local below, step, above, before, found = log.first - 1, 1, log.count - 1, log.base, log.newest
  while above - below > 1 do
    local probe = below + step
    if probe >= above then probe = (above + below - (above + below) % 2) / 2 end
    local at, sum = entry_of(log, probe)
    if at > cutoff and (sum - log.base) % MODULUS >= enough then
      above, found, step = probe, at, log.count
    else
      if below >= log.first then step = step * 2 end
      below, before = probe, sum
    end
  end
  return above, found, before
end

-- A time that was read of an entry: that of a log that was harmed may be any.
local function bounded(log, time) return math.max(math.min(time, log.newest), log.oldest) end

-- The short way of plain acquires of one limit: on logs that have room for an entry, and no notes.
if live and #shape == 22 and byte(shape) == 5 and find(shape, '\128\0', 14, true) == 14 and not shared
  and (not each or #each == 10 * #KEYS) then
  local _, limit, period, _, _, cost = unpacked('<BI5I7BBI7', shape)
  local numbers, calls, cutoff, left = sub(shape, 1, 13), 1, now - period, false
  for index, key in ipairs(KEYS) do
    local near = redis.pcall('GETRANGE', key, '0', '263')
    if each then calls, cost = unpacked('<I3I7', each, index * 10 - 9) end
    if calls == 1 and cost > 0 and cost <= limit and type(near) == 'string' and find(near, numbers, 42, true) == 42 then
      local newest, total, head, count, base, oldest, armed, slots = unpacked('<I7I5I4I4I5I7I5I4', near)
      local room, expires, first, leaves = 0, armed * 1000000, 0, oldest
      local whole = (#near < NEAR and #near or call('STRLEN', key)) == HEADER + slots * ENTRY and head < slots
        and count > 0 and count <= slots and oldest <= newest and newest < now and (total - base) % MODULUS <= 2^39
      local log = whole and (oldest <= cutoff or limit - (total - base) % MODULUS < cost) and { key = key, text = near,
        offset = 0, head = head, count = count, slots = slots, base = base, newest = newest, first = 0 }
      if whole and newest <= cutoff then
        first, base, total, oldest = count, 0, 0, now
      elseif whole and oldest <= cutoff then
        first, oldest, base = search(log, cutoff, 0)
        log.first, log.base, leaves, whole = first, base, oldest, oldest <= newest
      end
      room = limit - (total - base) % MODULUS
      local entries, covered = count - first, expires >= now + period and expires <= now + 2 * period + 1000000
      if whole and room < cost and room >= 0 then
        if cost - room > 1 then _, leaves = search(log, -1, cost - room) end
        -- As `bounded` does.
        leaves = math.max(math.min(leaves, newest), oldest)
        answers[index] = pack('<i7i7i7i3', room, newest + period - now, leaves + period - now, 0)
      elseif whole and room >= cost and covered and entries < slots then
        total = (total + cost) % MODULUS
        local place, entry = HEADER + head * ENTRY, pack('<I7I5', now, total)
        local header = pack('<I7I5I4I4I5I7', now, total, (head + 1) % slots, entries + 1, base, oldest)
        if #near < NEAR then header = header .. sub(near, 33, place) .. entry end
        if #near < NEAR or call('SETRANGE', key, string.format('%d', place), entry) then
          answers[index] = call('SETRANGE', key, '0', header) and pack('<i7i7i7i3', room - cost, period, 0, 1) or nil
        end
      end
    end
    left = left or not answers[index]
  end
  if KEYS[1] and not left then return table.concat(answers) end
end

-- As token_bucket.lua describes it: x is what is known of the log, y nothing.
ALGORITHMS[5] = {
  name = 'sliding_window_log', arguments = 'limit, period', most_of = { limit = 2^39 },
  size = 13, format = '<BI5I7', width = 13, stored = '<BI5I7', numbers_at = 42,
  spans = function(limit, _, period)
    if limit >= 1 and limit <= 2^39 and period >= 1 and period <= 2^51 then return period, 2 * period end
  end,
  -- Reads a log: what is known of it, the numbers it was written under, and what is noted after it. Beside what its
  -- header has, that is: how many of the oldest entries don't count any more (`first`), the units that the call takes
  -- (`change`), and the bytes that were read last (`text`, from `offset` on).
  read = function(limit, key)
    local near = redis.pcall('GETRANGE', key, '0', '263')
    if type(near) == 'table' then
      -- Another type is told by the caller; any other refusal, such as a missing right, ends the script here.
      if not find(near.err, '^WRONGTYPE') then call('GETRANGE', key, '0', '263') end
      return near
    end
    if near == '' and call('EXISTS', key) == 0 then return nil, limit.numbers, '' end
    if #near < HEADER then return '', '', '' end
    local newest, total, head, count, base, oldest, armed, slots = unpacked('<I7I5I4I4I5I7I5I4', near)
    local length = #near < NEAR and #near or call('STRLEN', key)
    local tail_size = length - HEADER - slots * ENTRY
    if (tail_size ~= 0 and tail_size ~= 53) or count > slots or head >= slots or oldest > newest or newest > 2^53
      or (total - base) % MODULUS > 2^39 or (count == 0 and total ~= base) then
      return '', '', ''
    end
    local tail = tail_size == 0 and '' or length < NEAR and sub(near, -53) or call('GETRANGE', key, '-53', '-1')
    if tail == string.rep('\0', 53) then tail = '' end
    return { key = key, near = near, newest = newest, total = total, head = head, count = count, base = base,
      oldest = oldest, armed = armed, slots = slots, has_tail = tail_size > 0, length = length,
      text = near, offset = 0, first = 0, change = 0 }, sub(near, 42, 54), tail
  end,
  level = function(log, now, longest, period)
    if not log then
      log = { newest = now, oldest = now, total = 0, base = 0, head = 0, count = 0, first = 0, slots = 0, change = 0,
        used = 0 }
      return 0, log, nil, now, 0
    end
    local at, time, used = now, log.newest, (log.total - log.base) % MODULUS
    if time - now > longest then
      ALGORITHMS[5].lump(log, used, now)
    elseif time > now and used > 0 then
      at = time
    end
    local cutoff = at - period
    if log.count > 0 and log.newest <= cutoff then
      log.first, log.base = log.count, log.total
    elseif log.count > 0 and log.oldest <= cutoff then
      log.first, log.oldest, log.base = search(log, cutoff, 0)
    end
    log.used = (log.total - log.base) % MODULUS
    if log.oldest > log.newest then return end
    return log.used, log, nil, at, log.armed, time
  end,
  -- All that is used in one entry.
  lump = function(log, used, at)
    log.lumped, log.newest, log.oldest, log.base, log.total, log.used = true, at, at, 0, used, used
    log.first, log.count, log.head, log.slots = 0, used > 0 and 1 or 0, 1, 1
    log.text, log.offset = string.rep('\0', HEADER) .. pack('<I7I5', at, used), 0
  end,
  -- A log under other numbers: the limit as it has it.
  other = function(limit, log, numbers, as_is, afresh)
    local own, most, period = ALGORITHMS[5], limit.most, limit.a
    local _, was_most, was_period = unpacked('<BI5I7', numbers)
    if not own.spans(was_most, 0, was_period) then return nil end
    local used = (log.total - log.base) % MODULUS
    local changed = was_most ~= most or was_period ~= period
    if changed and as_is and used > 0 then
      own.lump(log, math.min(math.max(most - was_most + used, 0), 2^39), log.newest)
    end
    if changed and afresh then own.lump(log, 0, log.newest) end
    if was_period ~= period and not (as_is or afresh) then
      if was_most / was_period >= most / period or used > most then
        local rule = limit
        limit = {}
        for name, value in pairs(rule) do limit[name] = value end
        limit.a, limit.numbers, limit.longest, limit.rule = was_period, numbers, math.max(period, was_period), rule
      else
        own.lump(log, used, log.newest)
      end
    end
    limit.changed = changed and not limit.rule
    return limit, own.level(log, now, limit.longest, limit.a)
  end,
  -- At the time of the newest, if that still counts there. No charge forgives units.
  convert = function(log, _, at, _, _, _, period)
    if log.lumped and log.newest > at - period then return log, nil, at end
    -- A copy: a penalty that finds no room leaves the log as it is.
    local copy = {}
    for name, value in pairs(log) do copy[name] = value end
    ALGORITHMS[5].lump(copy, log.used, log.newest > at - period and log.newest or at)
    return copy, nil, at
  end,
  wait = function(units, log, _, at, period)
    local enough, leaves = log.used + log.change - units, log.oldest
    if enough <= 0 then return 0 end
    if enough > log.used then
      leaves = at
    elseif enough > 1 then
      _, leaves = search(log, -1, enough)
      leaves = bounded(log, leaves)
    end
    return leaves + period - now
  end,
  take = function(units, log, _, at, period)
    log.change = units
    local used, last = log.used + units, units > 0 and at or log.newest
    return log, nil, at, used, used > 0 and last + period - now or 0
  end,
  give = function(units, newer, log, _, at)
    units = math.max(math.min(units, log.used - newer), 0)
    if units == 0 then return log, nil, at, 0 end
    log.used = log.used - units
    if log.used == 0 then
      log.first, log.base = log.count, log.total
    elseif newer > 0 then
      local first, oldest = search(log, -1, units + 1)
      log.first, log.oldest = first, bounded(log, oldest)
      log.base = (log.base + units) % MODULUS
    else
      local last, newest = search(log, -1, log.used)
      log.head, log.count, log.newest = (log.head - (log.count - 1 - last)) % log.slots, last + 1,
        bounded(log, newest)
      log.total, log.shrunk = (log.base + log.used) % MODULUS, true
    end
    return log, nil, at, units
  end,
  after = function(since, _, log, _, at, period)
    if since <= at - period or log.used == 0 then return 0, 0 end
    if since >= log.newest then return 0, log.used end
    local _, _, before = search(log, since, 0)
    return (log.total - before) % MODULUS, log.used
  end,
  addable = function(log) return 2^39 - log.used end,
  -- Writes a log: in place, or anew with room for a fifth more entries.
  write = function(limit, key, log, _, at, used, seconds, option, expires, tail)
    local entries, same = log.count - log.first, log.count > log.first and log.newest == at
    local from, head, newest, entry = log.head - entries, log.head, log.newest, nil
    if entries == 0 then log.base, log.total, log.oldest, newest = 0, 0, at, at end
    local total = (log.total + log.change) % MODULUS
    if log.change > 0 then
      if not same then entries = entries + 1 end
      newest, entry = at, pack('<I7I5', at, total)
    elseif log.shrunk then
      same, entry = true, pack('<I7I5', newest, total)
    end
    local short = log.near and not log.lumped and log.length < NEAR
    local in_place = log.near and not log.lumped and entries <= log.slots
      and not (option and entries * 4 + 16 < log.slots)
    if not in_place or short and option then
      return ALGORITHMS[5].rewrite(limit, key, log, from, entries, entry, newest, total, seconds, option, expires, tail)
    end
    if log.has_tail and tail == '' then tail = string.rep('\0', 53) end
    if entry and not same then head = (head + 1) % log.slots end
    local place = HEADER + (head - 1) % log.slots * ENTRY
    if entry then call('SETRANGE', key, string.format('%d', place), entry) end
    if tail ~= '' then call('SETRANGE', key, string.format('%d', HEADER + log.slots * ENTRY), tail) end
    local header = pack('<I7I5I4I4I5I7I5I4', newest, total, head, entries, log.base, log.oldest, seconds, log.slots)
    if option == 'PX' then call('PEXPIRE', key, expires) end
    if option == 'PXAT' then call('PEXPIREAT', key, expires) end
    -- What counts the entry comes last.
    return call('SETRANGE', key, '0', header .. limit.numbers)
  end,
  -- The ring anew, oldest first.
  rewrite = function(limit, key, log, from, entries, entry, newest, total, seconds, option, expires, tail)
    local ring = ''
    if log.lumped then
      ring = sub(log.text, HEADER + 1)
    elseif log.slots > 0 then
      ring = log.length < NEAR and sub(log.near, HEADER + 1, HEADER + log.slots * ENTRY)
        or call('GETRANGE', key, string.format('%d', HEADER), string.format('%d', HEADER + log.slots * ENTRY - 1))
    end
    local kept = entry and entries - 1 or entries
    local start = log.slots > 0 and from % log.slots * ENTRY or 0
    ring = sub(sub(ring, start + 1) .. sub(ring, 1, start), 1, kept * ENTRY) .. (entry or '')
    local slots = math.max(entries, 1, math.min(limit.most, entries + math.max(4, (entries - entries % 5) / 5)))
    local header = pack('<I7I5I4I4I5I7I5I4', newest, total, entries % slots, entries, log.base, log.oldest, seconds,
      slots)
    local state = header .. limit.numbers .. ring .. string.rep('\0', (slots - entries) * ENTRY) .. tail
    if option then return call('SET', key, state, option, expires) end
    return call('SET', key, state, 'KEEPTTL')
  end,
  -- Has a log expire later.
  prolong = function(key, armed, expires)
    call('PEXPIREAT', key, expires)
    return call('SETRANGE', key, '32', armed)
  end,
  inspect = function(log, limit)
    if not log or not log.near then return { now, 0, 0, now, limit.most, limit.a } end
    local newest, total, _, count, base, oldest, _, _, _, most, period = unpacked('<I7I5I4I4I5I7I5I4BI5I7', log.near)
    return { newest, count, (total - base) % MODULUS, oldest, most, period }
  end,
}
