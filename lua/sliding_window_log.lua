-- sliding_window_log: admits exactly `limit` units in any `period`.
--
-- ARGV, before cost, mode and now_us
--   ARGV[1] limit   units  1 .. 2^39
--   ARGV[2] period  us     1 .. 2^51
--   packed: BI7I7I7: the layout (6), these, cost
--
-- Reply of inspect
--   [7] time_us         us     when the state was written
--   [8] entries         in the log, as written
--   [9] used            units  in the log, as written
--   [10] oldest_us      us     its oldest entry
--   [11] state_limit    units  the numbers it was written under
--   [12] state_period   us
--
-- Formula
--   The log is a ring of entries, oldest first: a time, and the units taken up to and including it (a running
--   total modulo 2^40). Requests of one microsecond share an entry. An entry `period` old no longer counts.
--   used       = total - total at the last entry that no longer counts
--   allowed    : used + cost <= limit
--   retry_after: until enough of the oldest entries have left, found by their running totals
--   refund     : of the newest entries, or of the oldest where the units are known to be older than the newest;
--                penalty: an entry of this cost, up to 2^39 units in all
--   reset_after: newest + period - now
--   changed numbers keep what was used, also beyond a lower limit: another version's limit may be higher. A changed
--                period keeps at most limit
--   Reads O(1) entries where few have expired since the last write, else O(log n); writes one, or a small log whole.
--
-- Source
--   The sliding log of Figma, "An alternative approach to rate limiting", 2017, with costs.
--
-- Commands
--   TIME, GETRANGE, STRLEN, EXISTS; what takes or gives: SET, SETRANGE, PEXPIRE, PEXPIREAT; reset, and a refund of
--   all: DEL; inspect: PTTL
--
-- Expiry
--   PEXPIREAT also sets a long log's.

local NAME, ARGUMENTS, LENGTH, RESERVES = 'sliding_window_log', 'limit, period', 22, false
local STATE, LAYOUT_AT, LAYOUT = 54, 42, 6
if packed and #packed == LENGTH then layout, a, b, cost = struct.unpack('<BI7I7I7', packed) end
local limit, period = a, b
local longest = period
local whole = packed or limit % 1 + period % 1 == 0
local valid = whole and (layout or LAYOUT) == LAYOUT and (packed or #ARGV == 5)
  and limit >= 1 and limit <= 2^39 and period >= 1 and longest <= 2^51

-- The state: a header of 54 bytes, then `slots` entries of 12. `head` is the slot after the newest entry. With more
-- than 17 slots, 4 bytes and copies of 8 entries lie in between: the slot of the first copied entry plus 1, or 0 if
-- there are none. They save reading the ring for each entry that expires, and are valid while they include the oldest
-- entry. A key that is blocked, whose denials are counted, or that a refund last wrote after its newest entry, has a
-- tail; its layout is 1 above then. A long log keeps its tail, zeroed, until its expiry is next set.
local HEADER, ENTRY, COPIES, TAIL, MODULUS = STATE, 12, 96, 25, 2^40
local SMALL, WIDE = 17, HEADER + 4 + COPIES
-- Where the expiry and the number of slots are in it, and what one read brings: the header and, of a small log, all its
-- entries.
local EXPIRY_AT, SLOTS_AT, NEAR, NEAR_ENDS = 33, 38, 264, '263'

-- The functions that the fast path shares with the rest take all that they need as arguments, and write HEADER, ENTRY,
-- COPIES and MODULUS as numbers: a variable of the script that a function uses costs each call of the script, even one
-- that doesn't call the function.

-- Of a ring's entries from `first` on, finds the first that is younger than `cutoff` and by which `enough` units have
-- been taken since `base`; the newest is known to be one. Searches by doubling steps, then by bisection; `text` is what
-- has been read, from `offset` on. Returns its index, its time, the total before it, and what was read last. Returns
-- nothing if that can't be an entry of a log, such as one younger than the newest.
local function find(key, text, offset, ring, slots, head, count, newest, cutoff, first, base, enough)
  local below, step, above, before, start, found = first - 1, 1, count - 1, base, head - count, newest
  while above - below > 1 do
    local probe = below + step
    if probe >= above then probe = (above + below - (above + below) % 2) / 2 end
    local place = ring + (start + probe) % slots * 12
    if place < offset or place + 12 > offset + #text then
      -- Reads a few at once: the next one is usually needed next.
      offset = place
      text = redis.call('GETRANGE', key, string.format('%d', place), string.format('%d', place + 95))
      if #text < 12 then return end
    end
    local at, sum = struct.unpack('<I7I5', text, place - offset + 1)
    if at > cutoff and (sum - base) % 2^40 >= enough then
      -- From here on, bisect.
      above, found, step = probe, at, count - 1
    else
      if below >= first then step = step * 2 end
      below, before = probe, sum
    end
  end
  if found > newest then return end
  return above, found, before, text, offset
end

-- Drops the entries that have expired; the newest hasn't. Returns how many, the time of the oldest that stays, the
-- total before it, and the copies of entries to write, if these are new. Returns nothing if the log can't be read.
local function drop(key, near, ring, slots, head, count, newest, oldest, base, cutoff)
  -- Usually few have expired, and they and the next one have been read already.
  local first, slot, copied, text, offset = 0, (head - count) % slots, 0, near, 0
  local place, stop = 54 + slot * 12, #near
  if ring > 54 then
    -- The slot of the first copy, or -1.
    copied = struct.unpack('<I4', near, 55) - 1
    place, stop = 58 + (slot - copied) * 12, ring
    text, offset = '', 0
  end
  local from, expired = slot, oldest
  while copied >= 0 and place >= 54 and place + 24 <= stop and slot + 1 < slots and first + 1 < count do
    local at, sum, following = struct.unpack('<I7I5I7', near, place + 1)
    if at ~= expired then break end
    first, base, expired = first + 1, sum, following
    if following > cutoff and following <= newest then return first, following, sum, '' end
    place, slot = place + 12, slot + 1
  end
  if first > 0 and ring > 54 then text, offset = string.sub(near, 59, ring), ring + copied * 12 end
  local read_before, copies = offset, ''
  first, oldest, base, text, offset = find(key, text, offset, ring, slots, head, count, newest, cutoff, first, base, 0)
  if first and offset ~= read_before and #text == 96 then
    -- New copies are written if all eight are entries of the ring, if they include the oldest that stays, and if they
    -- don't yet include the newest, which may change.
    copied = (offset - ring) / 12
    local skipped = (copied - from) % slots
    if copied + 8 <= slots and skipped <= first and first < skipped + 8 and skipped + 8 < count then
      copies = struct.pack('<I4', copied + 1) .. text
    end
  end
  return first, oldest, base, copies
end

-- The fast path: most calls find a log under these numbers, which they extend, or are denied. A small log's expiry is
-- set anew here, too. It does the arithmetic of the functions below in fewer steps, and before most are defined: with
-- all that they share, that costs as much as a decision.
fast = fast and valid and cost > 0 and cost % 1 == 0 and not gives
if fast and key_count > 1 then states, answers = {}, {} end
local numbers, calls, answer = valid and struct.pack('<BI5I7', LAYOUT, limit, period), 1, nil
-- The latest that an expiry may be set to.
local latest = now_us + 2 * period + 1000000
local cutoff = now_us - period
for index = 1, fast and key_count or 0 do
  local key, near = KEYS[index], nil
  if states then
    near = redis.pcall('GETRANGE', key, '0', NEAR_ENDS)
    states[index] = near
  else
    near = redis.call('GETRANGE', key, '0', NEAR_ENDS)
    state = near
  end
  if several then cost, calls = struct.unpack('<I7I3', several, (index - 1) * EACH + 1) end
  if #near > HEADER and string.find(near, numbers, LAYOUT_AT, true) == LAYOUT_AT
    and (not several or calls == 1 and cost > 0 and not repeated[index]) then
    local newest, total, head, count, base, oldest, armed, slots = struct.unpack('<I7I5I4I4I5I7I5I4', near)
    local wide = slots > SMALL
    local ring, first, copies = wide and WIDE or HEADER, 0, ''
    local room = ring + slots * ENTRY
    -- In a packed call a long log's length isn't known until it is written.
    if count >= 1 and count <= slots and head < slots and oldest <= newest and newest <= now_us
      and (total - base) % MODULUS <= 2^39
      and (#near == room or wide and #near == NEAR and (packed or redis.call('STRLEN', key) == room)) then
      if newest <= cutoff then
        first, base = count, total
      elseif oldest <= cutoff then
        first, oldest, base, copies = drop(key, near, ring, slots, head, count, newest, oldest, base, cutoff)
      end
      -- A log that can't be read, or above the limit after a penalty, is left to the functions below.
      local live, left = first and count - first, first and limit - (total - base) % MODULUS or -1
      local arms = armed * 1000000 < now_us + period or armed * 1000000 > latest
      local units = cost
      if most_of and left >= 0 then units = math.min(cost, math.max(left, 1)) end
      if peeks and cost <= left then
        answer = { 1, limit, left, 0, live > 0 and newest + period - now_us or 0 }
      elseif units > left and units <= limit and left >= 0 and not forced then
        local found, leaves = true, oldest
        if units > left + 1 then
          found, leaves = find(key, near, 0, ring, slots, head, count, newest, cutoff, first, base, units - left)
        end
        if found then
          local reset_after, retry_after = newest + period - now_us, leaves + period - now_us
          answer = packed and struct.pack('<i7i7i7i7', -1 - left, reset_after, retry_after, 0)
            or { 0, limit, left, retry_after, reset_after, most_of and 0 or nil }
        end
      elseif units <= left and (newest == now_us or live < slots)
        and not (arms and (wide or live * 4 + 16 < slots)) then
        if live == 0 then base, total, oldest = 0, 0, now_us end
        local slot, length = newest == now_us and (head - 1) % slots or head, room
        if newest < now_us then head, live = (head + 1) % slots, live + 1 end
        total = (total + units) % MODULUS
        local place, entry = ring + slot * ENTRY, struct.pack('<I7I5', now_us, total)
        local start = struct.pack('<I7I5I4I4I5I7', now_us, total, head, live, base, oldest)
        if wide then
          if copies ~= '' then start = start .. string.sub(near, EXPIRY_AT, HEADER) .. copies end
          length = redis.call('SETRANGE', key, '0', start)
          if not packed or length == room then
            redis.call('SETRANGE', key, string.format('%d', place), entry)
          else
            -- The log turned out to be truncated: put the header back.
            redis.call('SETRANGE', key, '0', string.sub(near, 1, #start))
          end
        elseif arms then
          local seconds = (latest - latest % 1000000) / 1000000
          redis.call('SET', key, start .. struct.pack('<I5', seconds) .. string.sub(near, SLOTS_AT, place) .. entry
            .. string.sub(near, place + ENTRY + 1), 'PXAT', string.format('%d', seconds * 1000))
        else
          redis.call('SETRANGE', key, '0', start .. string.sub(near, EXPIRY_AT, place) .. entry)
        end
        if not packed or length == room then
          answer = packed and struct.pack('<i7i7', left - units, period)
            or { 1, limit, left - units, 0, period, most_of and units or nil }
          if remembers then answer.since = now_us end
        end
      end
    end
  end
  if not answer then missed = true elseif states then answers[index], answer = answer, nil else return answer end
end

local key, near, cutoff
local newest, total, head, count, base, oldest, armed, slots
local ring, copies
-- The decision is made at `time`; a state that is put back to now is written as of `moment`.
local time, moment, written
local changed, rebased, lump, unsure, noted
-- Whether a refund is of units taken before the newest entry.
local older
-- Of what counts: how many entries have expired before it, how many units it is, and how many entries.
local first, used, live, change

-- Finds the entry by which `enough` of the units that count had been taken.
local function search(enough)
  return find(key, near, 0, ring, slots, head, count, newest, cutoff, first, base, enough)
end

-- What can be taken now, and how long until the key is as if never used.
local function levels()
  local last = change > 0 and time or newest
  return math.max(limit - used, 0), used > 0 and last + period - now_us or 0
end

local function arm(at, server_time)
  if server_time then
    redis.call('PEXPIREAT', key, at)
  else
    redis.call('PEXPIRE', key, at)
  end
end

function read(name, is_one_of_several, known)
  key, near = name, known
  if type(near) ~= 'string' and is_one_of_several then
    near = redis.pcall('GETRANGE', key, '0', NEAR_ENDS)
    if type(near) == 'table' then return near end
  elseif type(near) ~= 'string' then
    near = redis.call('GETRANGE', key, '0', NEAR_ENDS)
  end
  newest, total, head, count, base, oldest, armed, slots = 0, 0, 0, 0, 0, 0, 0, 0
  ring, copies, unsure, noted, written = HEADER, '', false, false, 0
  if near == '' and redis.call('EXISTS', key) == 0 then return false, false, 0, 0, 0 end
  local version, was_limit, was_period
  local blocked_until, denied_since, denials, length = 0, 0, 0, #near
  if length < HEADER then return end
  newest, total, head, count, base, oldest, armed, slots, version, was_limit, was_period =
    struct.unpack('<I7I5I4I4I5I7I5I4BI5I7', near)
  if slots > SMALL then ring = WIDE end
  -- In a packed call a long log's length is checked only where the log is read or written.
  unsure = length == NEAR and packed and version == LAYOUT and slots > SMALL
  if unsure then
    length = ring + slots * ENTRY
  elseif length == NEAR then
    length = redis.call('STRLEN', key)
  end
  if version == LAYOUT + 1 and length == ring + slots * ENTRY + TAIL then
    local tail = length < NEAR and string.sub(near, -TAIL) or redis.call('GETRANGE', key, '-25', '-1')
    noted, length, version = true, length - TAIL, LAYOUT
    blocked_until, denied_since, denials, written = struct.unpack('<I7I7I4I7', tail)
  end
  if version == LAYOUT and length == ring + slots * ENTRY and newest <= 2^53 and oldest <= newest and count <= slots
    and head < slots and was_period >= 1 and (count >= 1 or (noted and total == base))
    and (total - base) % MODULUS <= 2^39 and written <= 2^53 then
    return true, noted, blocked_until, denied_since, denials
  end
end

function restore(state, blocked, as_is, afresh)
  local ahead = 0
  time, moment, change, first = now_us, now_us, 0, 0
  changed, rebased, lump, older = false, false, false, false
  if state then
    local was_limit, was_period = struct.unpack('<I5I7', near, LAYOUT_AT + 1)
    changed = was_limit ~= limit or was_period ~= period
    if newest > now_us or changed or noted then
      local left, latest, placed = (total - base) % MODULUS, math.max(newest, written), was_period ~= period
      if changed and (as_is or afresh) then
        left = (afresh or left == 0) and 0 or limit - math.min(math.max(was_limit - left, 0), limit)
        placed = true
      end
      if latest > now_us and left == 0 and not blocked then
        count = 0
      elseif latest - now_us > longest then
        ahead, newest, rebased = latest - now_us, now_us, true
      elseif latest > now_us then
        time = latest
      end
      if rebased or placed then
        -- Another clock or another period: what was used at the state's own time is placed in one entry.
        if not rebased then newest = latest end
        left = math.min(left, limit)
        lump, count, base, total = true, left > 0 and math.min(count, 1) or 0, 0, left
        oldest = newest
      end
      moment = time
    end
  else
    newest, oldest = now_us, now_us
  end

  -- Drop what no longer counts.
  cutoff = time - period
  if count > 0 and newest <= cutoff then
    first, base = count, total
  elseif count > 0 and oldest <= cutoff then
    first, oldest, base, copies = drop(key, near, ring, slots, head, count, newest, oldest, base, cutoff)
    if not first then return end
  end
  used = (total - base) % MODULUS
  if used > 2^39 then return end
  live = count - first
  return armed, changed, ahead, levels()
end

function wait(units)
  -- The oldest entry whose expiry frees enough units.
  local enough, leaves, found = used + units - limit, oldest, true
  if enough <= 0 then
    return 0
  elseif enough > used - change then
    leaves = time
  elseif enough > 1 then
    found, leaves = search(enough)
  end
  return found and leaves + period - now_us
end

-- What is owed of these units, which were taken at `since`: nothing once they are `period` old.
function owed(units, since)
  older = since < newest
  return since > cutoff and math.min(units, used) or 0
end

function move(units, mode)
  if older then
    -- Not the newest, which others took: they count for longer. The oldest are no younger than these.
    if units < used then
      first, oldest = search(units + 1)
      if not first then return end
    end
    base, used, live = (base + units) % MODULUS, used - units, count - first
    return true, levels()
  end
  change = units
  if mode == 'refund' then
    change = -math.min(units, used)
  elseif mode == 'penalty' then
    change = math.min(units, 2^39 - used)
  end
  used = used + change
  if change < 0 and used > 0 then
    -- The newest entry that stays.
    local last
    last, newest = search(used)
    if not last then return end
    head, live = (head - (count - 1 - last)) % slots, last - first + 1
    time = newest
  elseif change ~= 0 and live == 0 then
    oldest = time
  end
  return change ~= 0, levels()
end

-- What must be written, or at least counted or extended; false if the log is truncated.
function save(alters, counted, covered, armed_until, last, option, expires, tail, server_time)
  if alters then written = moment end
  if tail ~= '' or (used > 0 and written > (change > 0 and time or newest)) then
    tail = (tail ~= '' and tail or string.rep('\0', 18)) .. struct.pack('<I7', written)
  end
  local room = ring + slots * ENTRY
  if alters and used == 0 and tail == '' then
    redis.call('DEL', key)
    return true
  elseif not (alters or (counted and near == '')) then
    if counted then
      redis.call('SETRANGE', key, string.format('%d', room), tail)
      redis.call('SETRANGE', key, string.format('%d', LAYOUT_AT - 1), string.char(LAYOUT + 1))
    end
    if (counted or (changed and server_time)) and not covered then
      -- Denied, and the key would expire before it resets under the new numbers, or before its denials are forgotten.
      -- Until that is extended the state doesn't say when it expires, so that the next call tries again if it is
      -- refused. And out of memory, Redis refuses a SETRANGE, but no PEXPIREAT.
      redis.call('SETRANGE', key, string.format('%d', EXPIRY_AT - 1), '\0\0\0\0\0')
      arm(expires, server_time)
      redis.call('SETRANGE', key, string.format('%d', EXPIRY_AT - 1), struct.pack('<I5', armed_until))
    end
    return true
  end

  local same = live > 0 and newest == time
  total = (total + change) % MODULUS
  if live == 0 then base, total, oldest = 0, used, time end
  local arms = not server_time or changed or rebased or not covered or armed * 1000000 > last + 1000000
  if arms then armed = armed_until end
  local wasteful = arms and live * 4 + 16 < slots
  -- A long log's tail is written in place too, and goes when the expiry is next armed.
  local ends = noted or tail ~= ''
  local stays = not ends or (ring == WIDE and (tail ~= '' or not arms))
  if change ~= 0 and used > 0 and not (lump or wasteful) and stays and (same or live < slots) then
    local slot = same and (head - 1) % slots or head
    if not same then head, live = (head + 1) % slots, live + 1 end
    local place, entry = ring + slot * ENTRY, struct.pack('<I7I5', time, total)
    local start = struct.pack('<I7I5I4I4I5I7', time, total, head, live, base, oldest)
    if not arms and ring == HEADER and place < #near then
      redis.call('SETRANGE', key, '0', start .. string.sub(near, EXPIRY_AT, place) .. entry)
    else
      if change < 0 and ring == WIDE then copies = string.rep('\0', 4 + COPIES) end
      local at_place = string.format('%d', place)
      if arms then
        -- Until the header is written, last, nothing is taken; and the first write is the one that Redis refuses when
        -- it is out of memory.
        if unsure and redis.call('STRLEN', key) ~= room then return false end
        redis.call('SETRANGE', key, at_place, entry)
        arm(expires, server_time)
        start = start .. struct.pack('<I5I4BI5I7', armed, slots, ends and LAYOUT + 1 or LAYOUT, limit, period) .. copies
        redis.call('SETRANGE', key, '0', start)
      else
        if copies ~= '' then start = start .. string.sub(near, EXPIRY_AT, HEADER) .. copies end
        local length = redis.call('SETRANGE', key, '0', start)
        if unsure and length ~= room then
          -- The log is truncated. The header is put back.
          redis.call('SETRANGE', key, '0', string.sub(near, 1, #start))
          return false
        end
        redis.call('SETRANGE', key, at_place, entry)
      end
    end
    if ends then
      redis.call('SETRANGE', key, string.format('%d', room), tail ~= '' and tail or string.rep('\0', TAIL))
      if not noted then redis.call('SETRANGE', key, string.format('%d', LAYOUT_AT - 1), string.char(LAYOUT + 1)) end
    end
    return true
  end

  -- The ring is written anew, oldest first, with room for a fifth more.
  local entries = ''
  if live > 0 and lump then
    entries = struct.pack('<I7I5', newest, base + used - math.max(change, 0))
  elseif live > 0 then
    local from = (head - live) % slots
    if unsure and redis.call('STRLEN', key) ~= room then return false end
    local all = redis.call('GETRANGE', key, string.format('%d', ring), string.format('%d', room - 1))
    entries = string.sub(all, from * ENTRY + 1, (from + live) * ENTRY)
    if from + live > slots then entries = entries .. string.sub(all, 1, (from + live - slots) * ENTRY) end
  end
  if change > 0 or (change < 0 and used > 0) then
    if same then entries, live = string.sub(entries, 1, -ENTRY - 1), live - 1 end
    entries, live = entries .. struct.pack('<I7I5', time, total), live + 1
  elseif used == 0 then
    entries, live, oldest = '', 0, time
  else
    time = newest
  end
  slots = math.max(live, 1, math.min(limit, live + math.max(4, (live - live % 5) / 5)))
  local start = struct.pack('<I7I5I4I4I5I7I5I4BI5I7', time, total, live % slots, live, base, oldest, armed, slots,
    tail == '' and LAYOUT or LAYOUT + 1, limit, period)
  redis.call('SET', key, start .. string.rep('\0', slots > SMALL and WIDE - HEADER or 0) .. entries
    .. string.rep('\0', (slots - live) * ENTRY) .. tail, arms and option or 'PXAT',
    arms and expires or string.format('%d', armed * 1000))
  return true
end

function inspect()
  if near == '' then return { now_us, 0, 0, now_us, limit, period } end
  local newest, total, _, count, base, oldest, _, _, _, limit, period = struct.unpack('<I7I5I4I4I5I7I5I4BI5I7', near)
  return { math.max(newest, written), count, (total - base) % MODULUS, oldest, limit, period }
end
