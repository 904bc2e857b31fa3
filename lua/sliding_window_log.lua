-- sliding_window_log: admits exactly `limit` units in any `period`.
--
-- KEYS
--   KEYS[1]  the limit's state; packed, one or more
--
-- ARGV
--   ARGV[1] limit   units  1 .. 2^39
--   ARGV[2] period  us     1 .. 2^51
--   ARGV[3] cost    units  0 ..       0 takes nothing; of a block, its length in us, up to 2^51, 0 to lift it
--   ARGV[4] mode    -      acquire | peek | at-most | refund | penalty | block | reset | inspect
--                          and its options: +as-is or +reset, +overage, +block=us with 1 .. 2^51 us
--   ARGV[5] now_us  us     0 .. 2^52, or -1 for the server's time
--   packed, to acquire for each of the keys by itself, with less work for the server:
--   [1] numbers  struct's BI5I7I7: the layout (6), limit, period, cost
--   [2] now_us   us     the server's time unless given
--   [3] several  for each key, where they differ or a key stands twice, struct's I7I3: the cost, and how many calls
--                of it; without it no key may stand twice: more than the limit would be admitted
--
-- Reply
--   [1] allowed         0 | 1
--   [2] limit           units
--   [3] remaining       units  can be taken right now, after this decision
--   [4] retry_after_us  us     0: now, -1: never
--   [5] reset_after_us  us     until the last entry leaves the log
--   at-most appends:
--   [6] granted         units  taken, of the cost at most
--   inspect appends:
--   [6] ttl_ms          ms     PTTL: -2 without a key
--   [7] time_us         us     when the state was written
--   [8] entries         in the log, as written
--   [9] used            units  in the log, as written
--   [10] oldest_us      us     its oldest entry
--   [11] state_limit    units  the numbers it was written under
--   [12] state_period   us
--   [13] blocked_us     us     until the block ends, 0 if not blocked
--   [14] overage        denied calls in the time of a period from the first of them
--   a blocked key, also where this call blocked it, and +overage append last:
--   blocked_us, overage
--   packed, one string with struct's ddddd for each key: how many of its calls are allowed (-1: blocked; -2, among
--   several keys: it holds something else than this limit's state), limit, remaining, retry_after_us (of the first
--   call that isn't allowed), reset_after_us
--
-- Formula
--   The log is a ring of entries, oldest first: a time, and the units taken up to and including it (a running
--   total modulo 2^40). Requests of one microsecond share an entry. An entry `period` old no longer counts.
--   used       = total - total at the last entry that no longer counts
--   allowed    : used + cost <= limit
--   retry_after: until enough of the oldest entries have left, found by their running totals
--   at-most    : as allowed, for min(cost, remaining) units, or for one where none remains
--   refund     : of the newest entries; penalty: an entry of this cost, up to 2^39 units in all
--   block      : denies every call until it ends; a refund or a penalty changes the log beneath it. +block: a denial
--                starts one, unless the key is blocked already or the cost could never be allowed
--   changed numbers keep what was used, of more than the limit the newest units; +as-is: what was left; +reset: nothing
--   reset_after: newest + period - now
--   calls of a key: as many as fit one after the other
--   Reads O(1) entries where few have expired since the last write, else O(log n); writes one.
--
-- Source
--   The sliding log of Figma, "An alternative approach to rate limiting", 2017, with costs.
--
-- Commands
--   TIME, GETRANGE, STRLEN, EXISTS; what takes or gives: SET, SETRANGE, PEXPIRE, PEXPIREAT; reset, and a refund of
--   all: DEL; inspect: PTTL
--
-- Expiry
--   SET or PEXPIREAT arms it for twice the period, or this reset if a block made it longer, and up to a second;
--   SETRANGE keeps it while that covers this reset. A peek doesn't extend it after a change of numbers.
--
-- A deny writes
--   nothing, but for four cases: the state's time lay too far ahead and is brought back to now; the numbers have
--   changed so that the key would expire before it resets under the new ones, and its expiry alone is extended;
--   +overage counts it, and the expiry is extended where it would end before the count does; or +block blocks the key,
--   which is then written as a block writes it, unless it is blocked already or the cost could never be allowed.

-- Packed, ARGV begins with the numbers as a state ends its header with them, and what is asked is to acquire.
local packed = #ARGV < 5
local given = #KEYS
local read, numbers, layout, limit, period, cost, mode, now_us, several
if packed then
  numbers, mode, now_us, several = ARGV[1], 'acquire', -1, ARGV[3]
  if ARGV[2] then now_us = tonumber(ARGV[2]) end
  if numbers and #numbers == 20 then
    layout, limit, period, cost = struct.unpack('<BI5I7I7', numbers)
    read = now_us
  end
else
  -- An argument that is missing or no number fails here, without a check of each.
  read, limit, period, cost, mode, now_us = pcall(function(ARGV)
    return ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0, ARGV[4], ARGV[5] + 0
  end, ARGV)
end

if not read or given == 0 then
  local expected, fault, at = 'limit, period, cost, mode, now_us', nil, 0
  for name in string.gmatch(expected, '[%a_]+') do
    at = at + 1
    if not fault and not ARGV[at] then fault = 'missing ' .. name end
    if not fault and name ~= 'mode' and not tonumber(ARGV[at]) then fault = name .. ' is no number' end
  end
  if packed and ARGV[1] and not tonumber(ARGV[1]) then
    expected, fault = 'numbers, now_us, several', layout and 'now_us is no number' or 'numbers are not 20 bytes'
  end
  if given == 0 then fault = 'missing KEYS[1]' end
  return redis.error_reply('BADARG sliding_window_log: expected ' .. expected .. '; ' .. fault)
end

-- A mode may carry options: how the rule treats changed numbers, that its denials are counted, and that they block.
local as_is, afresh, overage, block_for = false, false, false, false
if mode ~= 'acquire' then
  mode = string.gsub(mode, '%+[%a-]+=?%d*', function(option)
    as_is, afresh, overage = as_is or option == '+as-is', afresh or option == '+reset', overage or option == '+overage'
    local us = tonumber(string.match(option, '^%+block=(%d+)$'))
    if us and us >= 1 and us <= 2^51 and not block_for then
      block_for = us
      return ''
    end
    return (option == '+as-is' or option == '+reset' or option == '+overage') and '' or nil
  end)
end

local server_time = now_us == -1
local longest = period
local good = limit >= 1 and limit <= 2^39 and period >= 1 and longest <= 2^51
  and (server_time or now_us >= 0 and now_us <= 2^52 and now_us % 1 == 0)
if packed then
  good = good and layout == 6 and (not several or #several == 10 * given)
else
  good = good and cost >= 0 and cost % 1 == 0 and limit % 1 + period % 1 == 0
    and (mode == 'acquire' or mode == 'peek' or mode == 'at-most' or mode == 'refund' or mode == 'penalty'
      or mode == 'reset' or mode == 'inspect' or (mode == 'block' and cost <= 2^51))
end
if not good then
  return redis.error_reply('BADARG sliding_window_log: expected whole numbers in the ranges of its header and a '
    .. 'mode, got ' .. string.gsub(table.concat(ARGV, ' '), '[^ -~]', '?'))
end

if server_time then
  local clock = redis.call('TIME')
  now_us = clock[1] * 1000000 + clock[2]
end
local plain = mode == 'acquire' and not overage and not block_for

-- The state: a header of 54 bytes, then `slots` entries of 12. `head` is the slot after the newest entry. Of more
-- than 17 slots, copies of 8 entries stand between, after the first one's slot, from 1, or 0: they save reading the
-- ring for each entry that expires. They hold while the oldest entry's is among them. Only a key that is blocked, whose
-- denials are counted, or that was last written after its newest entry, by a refund, has a tail; its layout is 7 then.
local HEADER, ENTRY, COPIES, TAIL, MODULUS = 54, 12, 96, 25, 2^40
local SMALL, WIDE = 17, HEADER + 4 + COPIES

-- Of a ring's entries from `first` to `last`, the first that is younger than `cutoff` and by which `enough` units have
-- been taken since `base`; the last is known to be. Found by doubling steps, then by bisection; `text` is what has been
-- read, from `offset` on. Its index, its time, the total before it; and what was read last. Nothing if that is no entry
-- of a log, as one younger than the newest.
local function find(key, text, offset, ring, start, slots, first, last, time, cutoff, base, enough)
  local below, step, above, before, newest = first - 1, 1, last, base, time
  while above - below > 1 do
    local probe = below + step
    if probe >= above then probe = (above + below - (above + below) % 2) / 2 end
    local place = ring + (start + probe) % slots * 12
    if place < offset or place + 12 > offset + #text then
      -- A few at once: mostly the next one is asked for next.
      offset = place
      text = redis.call('GETRANGE', key, string.format('%d', place), string.format('%d', place + 95))
      if #text < 12 then return end
    end
    local at, sum = struct.unpack('<I7I5', text, place - offset + 1)
    if at > cutoff and (sum - base) % 2^40 >= enough then
      above, time, step = probe, at, last
    else
      if below >= first then step = step * 2 end
      below, before = probe, sum
    end
  end
  if time > newest then return end
  return above, time, before, text, offset
end

-- What is broken off before it is answered is unreadable.
local keys, calls, answers, unreadable = packed and given or 1, 1, nil, nil
if keys > 1 then answers, unreadable = {}, struct.pack('<ddddd', -2, limit, 0, 0, 0) end
for index = 1, keys do repeat
  local key, near = KEYS[index], nil
  if mode == 'reset' then
    redis.call('DEL', key)
    return { 1, limit, limit, 0, 0 }
  elseif keys == 1 then
    -- One read brings the header and, of a small log, all its entries.
    near = redis.call('GETRANGE', key, '0', '263')
  else
    near, answers[index] = redis.pcall('GETRANGE', key, '0', '263'), unreadable
    if type(near) == 'table' then
      -- Of another type, it is unreadable; anything else that is refused, such as by a missing permission, ends the call.
      if string.find(near.err, '^WRONGTYPE') then break end
      return redis.error_reply(near.err .. ' command: getrange')
    end
  end
  if several then cost, calls = struct.unpack('<I7I3', several, index * 10 - 9) end

  local newest, total, head, count, base, oldest, armed, slots = now_us, 0, 0, 0, 0, now_us, 0, 0
  local time, moment, ring, copies = now_us, now_us, HEADER, ''
  local changed, rebased, lump, unsure = false, false, false, false
  -- Only some keys have this tail, which holds the time of the last write too.
  local noted, blocked_until, denied_since, denials, written = false, 0, 0, 0, 0
  if near ~= '' or redis.call('EXISTS', key) == 1 then
    local version, was_limit, was_period
    local length = #near
    if length >= HEADER then
      newest, total, head, count, base, oldest, armed, slots, version, was_limit, was_period =
        struct.unpack('<I7I5I4I4I5I7I5I4BI5I7', near)
      if slots > SMALL then ring = WIDE end
      -- Packed, how long a long log is shows where it is read or written.
      unsure = length == 264 and packed and version == 6 and slots > SMALL
      if unsure then
        length = ring + slots * ENTRY
      elseif length == 264 then
        length = redis.call('STRLEN', key)
      end
    end
    if version == 7 and length == ring + slots * ENTRY + TAIL then
      local tail = length < 264 and string.sub(near, -TAIL) or redis.call('GETRANGE', key, '-25', '-1')
      noted, length, version = true, length - TAIL, 6
      blocked_until, denied_since, denials, written = struct.unpack('<I7I7I4I7', tail)
    end
    if version ~= 6 or length ~= ring + slots * ENTRY or newest > 2^53 or oldest > newest or count > slots
      or head >= slots or was_period < 1 or (count < 1 and (not noted or total ~= base))
      or (total - base) % MODULUS > 2^39
      or blocked_until > 2^53 or written > 2^53 then
      break
    end

    changed = was_limit ~= limit or was_period ~= period
    if newest > now_us or changed or noted then
      local used = (total - base) % MODULUS
      local ahead = math.max(newest, written) - now_us
      local placed = was_period ~= period
      if changed and (as_is or afresh) then
        used = (afresh or used == 0) and 0 or limit - math.min(math.max(was_limit - used, 0), limit)
        placed = true
      end
      if ahead > 0 and used == 0 and blocked_until <= now_us then
        count = 0
      elseif ahead > longest then
        blocked_until = blocked_until - ahead
        newest, rebased = now_us, true
      elseif ahead > 0 then
        time = now_us + ahead
      end
      if rebased or placed then
        -- Another clock or another period: what was used at the state's own time is placed in one entry.
        if not rebased then newest = math.max(newest, written) end
        used = math.min(used, limit)
        lump, count, base, total = true, used > 0 and math.min(count, 1) or 0, 0, used
        oldest = newest
      end
      changed = changed or rebased
      moment = time
    end
  end

  -- Drop what no longer counts: `first` entries.
  local first, cutoff = 0, time - period
  if count > 0 and oldest <= cutoff then
    if newest <= cutoff then
      first, base = count, total
    else
      -- Mostly one entry has expired, and it and the next are at hand.
      local slot, copied, text, offset = (head - count) % slots, 0, near, 0
      local place, stop = HEADER + slot * ENTRY, #near
      if ring == WIDE then
        copied, text = struct.unpack('<I4', near, HEADER + 1) - 1, ''
        place, stop = HEADER + 4 + (slot - copied) * ENTRY, WIDE
      end
      local following = 0
      if copied >= 0 and place >= HEADER and place + 2 * ENTRY <= stop and slot + 1 < slots then
        local at, sum, next_at = struct.unpack('<I7I5I7', near, place + 1)
        if at == oldest then
          first, base, following = 1, sum, next_at
          if ring == WIDE then offset = ring + copied * ENTRY end
        end
      end
      local known = offset
      if following > cutoff and following <= newest then
        oldest = following
      else
        if offset > 0 then text = string.sub(near, HEADER + 5, WIDE) end
        first, oldest, base, text, offset = find(key, text, offset, ring, head - count, slots, first, count - 1, newest,
          cutoff, base, 0)
        if not first then break end
      end
      if offset ~= known and #text == COPIES then
        -- All of them in the ring, the oldest among them, and not yet the newest, which may change.
        copied = (offset - ring) / ENTRY
        local from = (copied - slot) % slots
        if copied + 8 <= slots and from <= first and first < from + 8 and from + 8 < count then
          copies = struct.pack('<I4', copied + 1) .. text
        end
      end
    end
  end

  local used = (total - base) % MODULUS
  if used > 2^39 then break end
  if changed and used > limit then
    -- Of what was used before the limit was lowered the newest units stay, as many as it is now.
    first, oldest = find(key, near, 0, ring, head - count, slots, first, count - 1, newest, cutoff, base,
      used - limit + 1)
    if not first then break end
    base, used = (total - limit) % MODULUS, limit
  end
  local live = count - first
  local remaining = used < limit and limit - used or 0
  local wanted = cost
  if mode == 'at-most' then wanted = math.min(cost, math.max(remaining, 1)) end

  -- How many of the calls are allowed, and what they take.
  local allowed, retry_after, reset_after = calls, 0, 0
  if wanted * calls > remaining then allowed = (remaining - remaining % wanted) / wanted end
  local change = allowed * wanted

  local writes, blocked, counted, blocks = true, false, false, false
  if noted or not plain then
    if mode == 'block' then blocked_until = cost > 0 and now_us + cost or 0 end
    blocked = blocked_until > now_us
    writes = mode ~= 'peek' and mode ~= 'inspect'
    if mode == 'refund' then
      allowed, change = 1, -math.min(cost, used)
    elseif mode == 'penalty' then
      allowed, change = 1, math.min(cost, 2^39 - used)
    elseif mode == 'block' then
      allowed, change = 1, 0
    elseif blocked then
      allowed, change = 0, 0
    elseif not writes then
      change = 0
    end

    -- A denial blocks the key, but for one that no wait would end.
    if block_for and allowed == 0 and writes and not blocked and wanted <= limit then
      blocked_until, blocked, blocks = now_us + block_for, true, true
    end
    if denials > 0 and (now_us < denied_since or now_us - denied_since >= longest) then denials = 0 end
    counted = overage and allowed == 0 and writes
    if counted then
      if denials == 0 then denied_since = now_us end
      denials = math.min(denials + 1, 2^32 - 1)
    end
  end

  if change ~= 0 then
    used = used + change
    remaining = used < limit and limit - used or 0
    if change < 0 and used > 0 then
      -- The newest entry that stays.
      local last
      last, newest = find(key, near, 0, ring, head - count, slots, first, count - 1, newest, cutoff, base, used)
      if not last then break end
      head, live = (head - (count - 1 - last)) % slots, last - first + 1
      time = newest
    elseif live == 0 then
      oldest = time
    end
  end
  if allowed < calls and wanted > remaining then
    if wanted > limit then
      retry_after = -1
    else
      -- The oldest entry by whose leaving enough units have left.
      local enough, leaves = used + wanted - limit, oldest
      if enough > used - change then
        leaves = time
      elseif enough > 1 then
        first, leaves = find(key, near, 0, ring, head - count, slots, first, count - 1, newest, cutoff, base, enough)
        if not first then break end
      end
      retry_after = leaves + period - now_us
    end
  end
  if used > 0 then reset_after = (change > 0 and time or newest) + period - now_us end
  if blocked then
    remaining, reset_after = 0, math.max(reset_after, blocked_until - now_us)
    if allowed == 0 and retry_after >= 0 then retry_after = math.max(retry_after, blocked_until - now_us) end
  end

  local settles = change ~= 0 or mode == 'block' or blocks
  if settles or changed or counted then
    if settles or rebased then written = moment end
    local tail = ''
    if blocked or denials > 0 or (used > 0 and written > (change > 0 and time or newest)) then
      tail = struct.pack('<I7I7I4I7', blocked and blocked_until or 0, denied_since, denials, written)
    end
    -- Whether the key's expiry lies between what it has to outlive, this reset and the time of counted denials, and the
    -- longest that it may be armed for.
    local keep, least = 2 * longest, now_us + reset_after
    if reset_after > keep then keep = reset_after end
    if denials > 0 and denied_since + longest > least then least = denied_since + longest end
    local covered, last = server_time and armed * 1000000 >= least, now_us + keep
    if (settles or (rebased and writes)) and used == 0 and tail == '' then
      redis.call('DEL', key)
    elseif settles or (rebased and writes) or (counted and near == '') then
      local same = live > 0 and newest == time
      total = (total + change) % MODULUS
      if live == 0 then base, total, oldest = 0, used, time end

      local expire, at = nil, 0
      if not server_time then
        -- The decision's time is not the server's: an hour at least, and the next call in server time arms it anew.
        armed, expire, at = 0, 'PX', math.max(3600000, (keep + -keep % 1000) / 1000)
      elseif changed or not covered or armed * 1000000 > last + 1000000 then
        armed = (last + 1000000 - last % 1000000) / 1000000
        expire, at = 'PXAT', armed * 1000
      end

      local wasteful = expire and live * 4 + 16 < slots
      -- A long log's tail is written in place too, and goes when the expiry is next armed.
      local ends = noted or tail ~= ''
      local stays = not ends or (ring == WIDE and (tail ~= '' or not expire))
      if change ~= 0 and used > 0 and not (lump or wasteful) and stays and (same or live < slots) then
        local slot = same and (head - 1) % slots or head
        if not same then head, live = (head + 1) % slots, live + 1 end
        local place, entry = ring + slot * ENTRY, struct.pack('<I7I5', time, total)
        local start = struct.pack('<I7I5I4I4I5I7', time, total, head, live, base, oldest)
        if not expire and ring == HEADER and place < #near then
          redis.call('SETRANGE', key, '0', start .. string.sub(near, 33, place) .. entry)
        else
          if change < 0 and ring == WIDE then copies = string.rep('\0', 4 + COPIES) end
          local at_place = string.format('%d', place)
          if expire then
            -- Until the header is written, last, nothing is taken; and what is written first is what Redis refuses
            -- where it is out of memory.
            if unsure and redis.call('STRLEN', key) ~= ring + slots * ENTRY then break end
            redis.call('SETRANGE', key, at_place, entry)
            if server_time then
              redis.call('PEXPIREAT', key, string.format('%d', at))
            else
              redis.call('PEXPIRE', key, string.format('%d', at))
            end
            start = start .. struct.pack('<I5I4BI5I7', armed, slots, ends and 7 or 6, limit, period) .. copies
            redis.call('SETRANGE', key, '0', start)
          else
            if copies ~= '' then start = start .. string.sub(near, 33, HEADER) .. copies end
            local length = redis.call('SETRANGE', key, '0', start)
            if unsure and length ~= ring + slots * ENTRY then
              -- The log has been cut. The header is put back.
              redis.call('SETRANGE', key, '0', string.sub(near, 1, #start))
              break
            end
            redis.call('SETRANGE', key, at_place, entry)
          end
        end
        if ends then
          if tail == '' then tail = string.rep('\0', TAIL) end
          redis.call('SETRANGE', key, string.format('%d', ring + slots * ENTRY), tail)
          if not noted then redis.call('SETRANGE', key, '41', '\7') end
        end
      else
        -- The ring is written anew, oldest first, with room for a fifth more.
        local entries = ''
        if live > 0 and lump then
          entries = struct.pack('<I7I5', newest, base + used - math.max(change, 0))
        elseif live > 0 then
          local from = (head - live) % slots
          if unsure and redis.call('STRLEN', key) ~= ring + slots * ENTRY then break end
          local all = redis.call('GETRANGE', key, string.format('%d', ring),
            string.format('%d', ring + slots * ENTRY - 1))
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
        redis.call('SET', key, struct.pack('<I7I5I4I4I5I7I5I4BI5I7', time, total, live % slots, live, base, oldest,
          armed, slots, tail == '' and 6 or 7, limit, period) .. string.rep('\0', slots > SMALL and WIDE - HEADER or 0)
          .. entries .. string.rep('\0', (slots - live) * ENTRY) .. tail, expire or 'PXAT',
          string.format('%d', expire and at or armed * 1000))
      end
    else
      if counted then
        redis.call('SETRANGE', key, string.format('%d', ring + slots * ENTRY), tail)
        redis.call('SETRANGE', key, '41', '\7')
      end
      if (counted or (changed and server_time)) and not covered and writes then
        -- Denied, and the key would expire before it resets under the new numbers, or before its denials are forgotten.
        armed = server_time and (last + 1000000 - last % 1000000) / 1000000 or 0
        -- In this order, since Redis refuses a SETRANGE, but no PEXPIREAT, where it is out of memory.
        redis.call('SETRANGE', key, '32', struct.pack('<I5', armed))
        if server_time then
          redis.call('PEXPIREAT', key, string.format('%d', armed * 1000))
        else
          redis.call('PEXPIRE', key, string.format('%d', math.max(3600000, (keep + -keep % 1000) / 1000)))
        end
      end
    end
  end

  if packed then
    local answer = struct.pack('<ddddd', blocked and -1 or allowed, limit, remaining, retry_after, reset_after)
    if keys == 1 then return answer end
    answers[index] = answer
    break
  end
  local answer = { allowed, limit, remaining, retry_after, reset_after }
  if mode == 'at-most' then
    answer[6] = change
  elseif mode == 'inspect' then
    local ttl_ms, fields = redis.call('PTTL', key), { now_us, 0, 0, 0, 0, now_us, 0, 0, 6, limit, period }
    if near ~= '' then fields = { struct.unpack('<I7I5I4I4I5I7I5I4BI5I7', near) } end
    fields[1], fields[2] = math.max(fields[1], written), (fields[2] - fields[5]) % MODULUS
    for at, field in ipairs({ ttl_ms, fields[1], fields[4], fields[2], fields[6], fields[10], fields[11] }) do
      answer[5 + at] = field
    end
  end
  if blocked or overage or mode == 'inspect' then
    answer[#answer + 1] = blocked and blocked_until - now_us or 0
    answer[#answer + 1] = denials
  end
  return answer
until true end
if keys == 1 then
  return redis.error_reply('BADSTATE sliding_window_log: the key holds something else than this limit\'s state')
end
return table.concat(answers)
