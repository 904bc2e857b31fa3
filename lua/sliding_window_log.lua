-- sliding_window_log: admits exactly `limit` units in any `period`.
--
-- KEYS
--   KEYS[1]  the limit's state
--
-- ARGV
--   ARGV[1] limit   units  1 .. 2^39
--   ARGV[2] period  us     1 .. 2^51
--   ARGV[3] cost    units  0 ..       0 takes nothing; of a block, its length in us, up to 2^51, 0 to lift it
--   ARGV[4] mode    -      acquire | peek | at-most | refund | penalty | block | reset | inspect
--                          and its options: +as-is or +reset, +overage
--   ARGV[5] now_us  us     0 .. 2^52, or -1 for the server's time
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
--   [7] time_us         us     when the state was written: its newest entry
--   [8] entries         in the log, as written
--   [9] used            units  in the log, as written
--   [10] oldest_us      us     its oldest entry
--   [11] state_limit    units  the numbers it was written under
--   [12] state_period   us
--   [13] blocked_us     us     until the block ends, 0 if not blocked
--   [14] overage        denied calls in the time of a period from the first of them
--   a blocked key, and +overage, append last:
--   blocked_us, overage
--
-- Formula
--   The log is a ring of entries, oldest first: a time, and the units taken up to and including it (a running
--   total modulo 2^40). Requests of one microsecond share an entry. An entry `period` old no longer counts.
--   used       = total - total at the last entry that no longer counts
--   allowed    : used + cost <= limit
--   retry_after: until enough of the oldest entries have left, found by their running totals
--   at-most    : as allowed, for min(cost, remaining) units, or for one where none remains
--   refund     : of the newest entries; penalty: an entry of this cost, up to 2^39 units in all
--   block      : denies every call until it ends; a refund or a penalty changes the log beneath it
--   changed numbers keep what was used; +as-is: what was left; +reset: nothing
--   reset_after: newest + period - now
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
--   SETRANGE keeps it while that covers this reset.
--
-- A deny writes
--   nothing, but for three cases: the state's time lay too far ahead and is brought back to now; the numbers have
--   changed so that the key would expire before it resets under the new ones, and its expiry alone is extended; or
--   +overage counts it.

local key = KEYS[1]
local limit, period = ARGV[1] + 0, ARGV[2] + 0
local cost, mode, now_us = ARGV[3] + 0, ARGV[4], ARGV[5] + 0

-- A mode may carry options: how the rule treats changed numbers, and that its denials are counted.
local as_is, afresh, overage = false, false, false
if mode ~= 'acquire' then
  mode = string.gsub(mode, '%+[%a-]+', function(option)
    as_is, afresh, overage = as_is or option == '+as-is', afresh or option == '+reset', overage or option == '+overage'
    return (option == '+as-is' or option == '+reset' or option == '+overage') and '' or nil
  end)
end

local longest = period
if not (limit >= 1 and limit <= 2^39 and period >= 1 and period <= 2^51 and cost >= 0 and now_us >= -1
    and now_us <= 2^52)
  or limit % 1 + period % 1 + cost % 1 + now_us % 1 ~= 0
  or (mode ~= 'acquire' and mode ~= 'peek' and mode ~= 'at-most' and mode ~= 'refund' and mode ~= 'penalty' and
    mode ~= 'block' and mode ~= 'reset' and mode ~= 'inspect')
  or (mode == 'block' and cost > 2^51) then
  return redis.error_reply('BADARG sliding_window_log: expected whole numbers in the ranges of its header and a '
    .. 'mode, got ' .. table.concat(ARGV, ' '))
end

if mode == 'reset' then
  redis.call('DEL', key)
  return { 1, limit, limit, 0, 0 }
end

local server_time = now_us == -1
if server_time then
  local clock = redis.call('TIME')
  now_us = clock[1] * 1000000 + clock[2]
end

-- The state: a header of 47 bytes, then `slots` entries of 12. `head` is the slot after the newest entry. Only a key
-- that is blocked, or whose denials are counted, has a tail, which holds the time of the last write beneath a block.
local HEADER, ENTRY, TAIL, MODULUS = 47, 12, 25, 2^40
local UNREADABLE = 'BADSTATE sliding_window_log: the key holds something else than this limit\'s state'
local newest, head, count, base, total, armed = now_us, 0, 0, 0, 0, 0
local slots, was_limit, was_period = 0, limit, period
local version
local changed, rebased, lump = false, false, false
local noted, blocked_until, denied_since, denials, written = false, 0, 0, 0, 0

-- One read brings the header and, of a small log, all its entries.
local near = redis.call('GETRANGE', key, '0', '263')
if near ~= '' then
  if #near >= HEADER then
    newest, head, count, base, total, armed, version, slots, was_limit, was_period =
      struct.unpack('<I7I4I4I5I5I5BI4I5I7', near)
  end
  local ring_end = HEADER + slots * ENTRY
  local length = #near < 264 and #near or redis.call('STRLEN', key)
  noted = length == ring_end + TAIL
  if noted then
    local tail = length < 264 and string.sub(near, -TAIL) or redis.call('GETRANGE', key, ring_end, '-1')
    blocked_until, denied_since, denials, written = struct.unpack('<I7I7I4I7', tail)
  end
  if version ~= 5 or newest > 2^53 or (count < 1 and not noted) or count > slots or head >= slots or was_period < 1
    or (length ~= ring_end and not noted) or (total - base) % MODULUS > 2^39 or blocked_until > 2^53
    or written > 2^53 then
    return redis.error_reply(UNREADABLE)
  end
elseif redis.call('EXISTS', key) == 1 then
  return redis.error_reply(UNREADABLE)
end

-- The time and the running total of the i-th entry, from 0 for the oldest.
local function entry(i)
  if lump then return newest, total end
  local at = HEADER + (head - count + i) % slots * ENTRY
  if at + ENTRY <= #near then return struct.unpack('<I7I5', near, at + 1) end
  return struct.unpack('<I7I5', redis.call('GETRANGE', key, at, at + ENTRY - 1))
end

local time = now_us
if near ~= '' then
  local used = (total - base) % MODULUS
  local ahead = math.max(newest, written) - now_us
  local renumbered = was_limit ~= limit or was_period ~= period
  local placed = was_period ~= period
  if renumbered and (as_is or afresh) then
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
  end
  changed = renumbered or rebased
end
local moment = time

if mode == 'block' then blocked_until = cost > 0 and now_us + cost or 0 end
local blocked = blocked_until > now_us
if denials > 0 and (now_us < denied_since or now_us - denied_since >= longest) then denials = 0 end

-- Drop what no longer counts: `first` entries, found by doubling steps from the oldest, then by bisection.
local first = 0
if count > 0 and newest <= time - period then
  first, base = count, total
elseif count > 0 then
  local cutoff = time - period
  local below, step, above = -1, 0, count - 1
  while step < above do
    local at, sum = entry(step)
    if at > cutoff then
      above = step
    else
      below, base = step, sum
      step = step * 2 + 1
    end
  end
  while above - below > 1 do
    local middle = (above + below - (above + below) % 2) / 2
    local at, sum = entry(middle)
    if at > cutoff then
      above = middle
    else
      below, base = middle, sum
    end
  end
  first = above
end

local used = (total - base) % MODULUS
local remaining = used < limit and limit - used or 0
local wanted = cost
if mode == 'at-most' then wanted = math.min(cost, math.max(remaining, 1)) end
local fits = wanted == 0 or (wanted <= limit and wanted <= limit - used)
local allowed = fits and not blocked

-- What this call takes, or gives back if negative.
local change = 0
if mode == 'refund' then
  fits, allowed, change = true, true, -math.min(cost, used)
elseif mode == 'penalty' then
  fits, allowed, change = true, true, math.min(cost, 2^39 - used)
elseif mode == 'block' then
  fits, allowed = true, true
elseif allowed and mode ~= 'peek' and mode ~= 'inspect' then
  change = wanted
end

local retry_after = 0
local live = count - first
if not fits and wanted > limit then
  retry_after = -1
elseif not fits or (change < 0 and used + change > 0) then
  -- The oldest entry by whose leaving enough units have left; of a refund, the newest that stays.
  local enough = change < 0 and used + change or used + wanted - limit
  local below, step, above = first - 1, first, count - 1
  local leaves = newest
  while step < above do
    local at, sum = entry(step)
    if (sum - base) % MODULUS >= enough then
      above, leaves = step, at
    else
      below = step
      step = first + (step - first) * 2 + 1
    end
  end
  while above - below > 1 do
    local middle = (above + below - (above + below) % 2) / 2
    local at, sum = entry(middle)
    if (sum - base) % MODULUS >= enough then
      above, leaves = middle, at
    else
      below = middle
    end
  end
  if change < 0 then
    head, live = (head - (count - 1 - above)) % slots, above - first + 1
    newest, time = leaves, leaves
  else
    retry_after = leaves + period - now_us
  end
end

used = used + change
if change ~= 0 then remaining = used < limit and limit - used or 0 end
local reset_after = 0
if used > 0 then reset_after = (change > 0 and time or newest) + period - now_us end

if blocked then
  remaining, reset_after = 0, math.max(reset_after, blocked_until - now_us)
  if not allowed and retry_after >= 0 then retry_after = math.max(retry_after, blocked_until - now_us) end
end

local writes = mode ~= 'peek' and mode ~= 'inspect'
local counted = overage and not allowed and writes
if counted then
  if denials == 0 then denied_since = now_us end
  denials = math.min(denials + 1, 2^32 - 1)
end
local settles = change ~= 0 or mode == 'block'
if settles or rebased then written = moment end
local tail = ''
if blocked or denials > 0 then
  tail = struct.pack('<I7I7I4I7', blocked and blocked_until or 0, denied_since, denials, blocked and written or 0)
end

-- Whether the key's expiry lies between this reset and the longest that it may be armed for.
local last = now_us + math.max(2 * longest, reset_after)
local covered = server_time and armed * 1000000 >= now_us + reset_after
if (settles or (rebased and writes)) and used == 0 and tail == '' then
  redis.call('DEL', key)
elseif settles or (rebased and writes) or (counted and near == '') then
  local same = live > 0 and newest == time
  total = (total + change) % MODULUS
  if live == 0 then base, total = 0, used end

  local expire, at = nil, 0
  if not server_time then
    -- The decision's time is not the server's: an hour at least, and the next call in server time arms it anew.
    armed = 0
    expire, at = 'PX', math.max(3600000, 2 * (longest + -longest % 1000) / 1000,
      (reset_after + -reset_after % 1000) / 1000)
  elseif changed or not covered or armed * 1000000 > last + 1000000 then
    armed = (last + 1000000 - last % 1000000) / 1000000
    expire, at = 'PXAT', armed * 1000
  end

  local wasteful = expire and live * 4 + 16 < slots
  if change ~= 0 and not (lump or wasteful or noted or tail ~= '') and (same or live < slots) then
    local slot = same and (head - 1) % slots or head
    if not same then head, live = (head + 1) % slots, live + 1 end
    -- Until the header is written, last, nothing is taken.
    redis.call('SETRANGE', key, HEADER + slot * ENTRY, struct.pack('<I7I5', time, total))
    if expire then
      redis.call(expire == 'PX' and 'PEXPIRE' or 'PEXPIREAT', key, string.format('%d', at))
      redis.call('SETRANGE', key, '0', struct.pack('<I7I4I4I5I5I5BI4I5I7', time, head, live, base, total, armed, 5,
        slots, limit, period))
    else
      redis.call('SETRANGE', key, '0', struct.pack('<I7I4I4I5I5', time, head, live, base, total))
    end
  else
    -- The ring is written anew, oldest first, with room for a quarter more.
    local ring = ''
    if live > 0 and lump then
      ring = struct.pack('<I7I5', newest, base + used - math.max(change, 0))
    elseif live > 0 then
      local from = (head - live) % slots
      local all = redis.call('GETRANGE', key, HEADER, HEADER + slots * ENTRY - 1)
      ring = string.sub(all .. all, from * ENTRY + 1, (from + live) * ENTRY)
    end
    if change > 0 or (change < 0 and used > 0) then
      if same then ring, live = string.sub(ring, 1, -ENTRY - 1), live - 1 end
      ring, live = ring .. struct.pack('<I7I5', time, total), live + 1
    elseif used == 0 then
      ring, live = '', 0
    else
      time = newest
    end
    slots = math.max(live, 1, math.min(limit, live + 4 + (live - live % 4) / 4))
    redis.call('SET', key, struct.pack('<I7I4I4I5I5I5BI4I5I7', time, live % slots, live, base, total, armed, 5, slots,
      limit, period) .. ring .. string.rep('\0', (slots - live) * ENTRY) .. tail, expire or 'PXAT',
      string.format('%d', expire and at or armed * 1000))
  end
else
  if counted then redis.call('SETRANGE', key, HEADER + slots * ENTRY, tail) end
  if changed and not covered and server_time and writes then
    -- Denied, and the key would expire before it resets under the new numbers.
    armed = (last + 1000000 - last % 1000000) / 1000000
    redis.call('PEXPIREAT', key, string.format('%d', armed * 1000))
    redis.call('SETRANGE', key, '25', struct.pack('<I5', armed))
  end
end

local answer = { allowed and 1 or 0, limit, remaining, retry_after, reset_after }
if mode == 'at-most' then
  answer[6] = change
elseif mode == 'inspect' then
  local oldest = time
  if near ~= '' then
    time, head, count, base, total = struct.unpack('<I7I4I4I5I5', near)
    lump, oldest = false, time
    if count > 0 then oldest = entry(0) end
  end
  for index, field in ipairs({ redis.call('PTTL', key), time, count, (total - base) % MODULUS, oldest, was_limit,
    was_period }) do
    answer[5 + index] = field
  end
end
if blocked or overage or mode == 'inspect' then
  answer[#answer + 1] = blocked and blocked_until - now_us or 0
  answer[#answer + 1] = denials
end
return answer
