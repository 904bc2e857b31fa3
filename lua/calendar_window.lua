-- calendar_window: admits `limit` units in each window of the calendar, such as a month; nothing carries over.
--
-- ARGV, before cost, mode and now_us
--   ARGV[1] limit   units  1 .. 2^53 - 1  in each window
--   ARGV[2] first   us     -2^53 ..   where a window starts: us since the epoch, negative before 1970
--   ARGV[3] second  us     above first: where it ends, and the next one starts
--   ARGV[4] stop    us     above second, .. 2^53: where that one ends
--   The script knows no calendar: the caller passes two consecutive windows, and it uses the one that contains now.
--   packed: BI7i7i7i7I7: the layout (8), these, cost
--
-- Reply of inspect
--   [7] time_us         us     when the state was written
--   [8] window_us       us     the start of its window
--   [9] used            units  in its window
--   [10] state_limit    units  the limit it was written under
--   Denials are counted in the window that contains now. Packed, a key's last number may also be -3: as STALE, and the
--   third is now_us.
--   If now is in neither window, the error is STALE, which ends with now_us=<us>: nothing was charged or written, and
--   the call can be repeated with the windows around that time. So it is if now is in the second window and the
--   state's time after it: the windows around now show whether that is too far ahead.
--
-- Formula
--   remaining  : limit - used, 0 at least, where used is what was taken since the window's start
--   allowed    : cost <= remaining
--   retry_after, reset_after: to the window's end
--   refund     : used - cost, 0 at least, of the window that now is in; penalty: used + cost, 2^53 at most: beyond the
--                limit until the window ends, since nothing carries over
--   changed numbers, and other windows, keep what was used in the window that contains the state's time, also beyond
--                 a lower limit: another version's may be higher. If the state's time is in neither window a change
--                 can't be detected, and counts as none; nor can it if the windows start at the same time
--   a state's time ahead of now counts as now, if ahead by at most the longer of the two windows and before stop;
--                 otherwise the state is brought back to now
--
-- Source
--   The counter per window of Redis's INCR documentation.
--
-- Expiry
--   SET arms it for the window's end plus an hour (or the window's length, if less), since a clock may step back across
--   the end; or for a block's end; plus up to a second. SETRANGE keeps it within the window.

local NAME, ARGUMENTS, LENGTH, RESERVES = 'calendar_window', 'limit, first, second, stop', 36, false
local STATE, LAYOUT_AT, LAYOUT = 34, 20, 8
if packed and #packed == LENGTH then layout, a, b, c, d, cost = struct.unpack('<BI7i7i7i7I7', packed) end
local limit, first, second, stop = a, b, c, d
-- The windows determine how long a key is kept.
local longest = 0
local whole = packed or limit % 1 + first % 1 + second % 1 + stop % 1 == 0
local valid = whole and (layout or LAYOUT) == LAYOUT and (packed or #ARGV == 7)
  and limit >= 1 and limit < 2^53 and first >= -2^53 and first < second and second < stop and stop <= 2^53
-- The window that contains now, and its end; none if now is in neither.
local here, hence
if now_us >= first and now_us < second then
  here, hence = first, second
elseif now_us >= second and now_us < stop then
  here, hence = second, stop
end

-- The fast path: a state in the window that contains now.
fast = fast and valid and cost > 0 and cost % 1 == 0 and here
if fast and key_count > 1 then states, answers = redis.call('MGET', unpack(KEYS)), {} end
local numbers, calls, answer = fast and struct.pack('<BI7i7', LAYOUT, limit, here), 1, nil
local latest = fast and hence + math.min(hence - here, 3600000000) + 1000000
for index = 1, fast and key_count or 0 do
  if states then state = states[index] else state = redis.call('GET', KEYS[1]) end
  if several then cost, calls = struct.unpack('<I7I3', several, (index - 1) * EACH + 1) end
  if state and #state == STATE and string.find(state, numbers, LAYOUT_AT, true)
    and (not several or calls == 1 and cost > 0 and not repeated[index]) then
    local time, used, armed = struct.unpack('<I7I7I5', state)
    local expires, reset_after = armed * 1000000, hence - now_us
    -- Windows that start together may end apart: a day's state isn't kept until the week's end.
    if time <= now_us and time >= here and used <= limit and expires >= hence then
      local left = limit - used
      local units = cost
      if unusual then
        if gives and cost >= used then
          if used > 0 then redis.call('DEL', KEYS[index]) end
          return { 1, limit, limit, 0, 0 }
        elseif peeks and cost <= left then
          return { 1, limit, left, 0, used > 0 and reset_after or 0 }
        end
        units = gives and -cost or most_of and math.min(cost, math.max(left, 1)) or cost
      end
      if units > left and units <= limit and not forced then
        answer = packed and struct.pack('<i7i7i7i7', -1 - left, reset_after, reset_after, 0)
          or { 0, limit, left, reset_after, reset_after, most_of and 0 or nil }
      elseif units <= left and expires <= latest then
        redis.call('SETRANGE', KEYS[index], '0', struct.pack('<I7I7', now_us, used + units))
        answer = packed and struct.pack('<i7i7', left - units, reset_after)
          or { 1, limit, left - units, 0, reset_after, most_of and units or nil }
        if remembers then answer.since = now_us end
      end
    end
  end
  if not answer then missed = true elseif states then answers[index], answer = answer, nil else return answer end
end

-- The decision is made at `time`, in the window from `start` to `ends`: now, or the state's time if now is before it.
local time, start, ends, used

-- What can be taken now, and how long until the key is as if never used.
local function levels() return math.max(limit - used, 0), used > 0 and ends - now_us or 0 end

function window_of() return here, hence end

function restore(state, blocked, as_is, afresh)
  time, used, start, ends = now_us, 0, here, hence
  if not state then return 0, false, 0, levels() end
  local ahead, armed, version, was_limit, was_start = 0, 0, nil, nil, nil
  time, used, armed, version, was_limit, was_start = struct.unpack('<I7I7I5BI7i7', state)
  if version ~= LAYOUT or time > 2^53 or was_start > time or was_start < -2^53 or was_limit > 2^53 or used > 2^53 then
    return
  end
  if time < start then
    time, used = now_us, 0
    return armed, true, 0, levels()
  end
  if time >= second and time < stop then start, ends = second, stop end
  local changed = was_limit ~= limit or (was_start ~= start and time < stop)
  if changed then
    -- Changed numbers, or another calendar: what was used in the window of the state's own time stays used, also beyond
    -- a lower limit, since another version's limit may be higher.
    if as_is and used > 0 then used = limit - math.min(limit, math.max(was_limit - used, 0)) end
    if afresh then used = 0 end
  end
  if time <= now_us then
    time = now_us
  elseif used == 0 and not blocked then
    time, start, ends, changed = now_us, here, hence, true
  elseif time >= stop and here == second then
    return nil, 'STALE'
  elseif time >= stop or time - now_us > math.max(second - first, stop - second) then
    ahead, time, start, ends, used = time - now_us, now_us, here, hence, math.min(limit, used)
  end
  -- Windows that start together may end apart.
  return armed, changed or (used > 0 and armed * 1000000 < ends), ahead, levels()
end

function wait(units) return units > limit - used and ends - now_us or 0 end

-- What is owed of these units, which were taken at `since`: nothing once their window has ended.
function owed(units, since) return since >= start and math.min(units, used) or 0 end

function move(units, mode)
  if mode == 'refund' then
    units = -math.min(units, used)
  elseif mode == 'penalty' then
    units = math.min(units, 2^53 - used)
  end
  used = used + units
  return units ~= 0, levels()
end

function write()
  return struct.pack('<I7I7', time, used), struct.pack('<BI7i7', LAYOUT, limit, start),
    ends + math.min(ends - start, 3600000000)
end

function inspect(state)
  local time, used, _, _, limit, start = struct.unpack('<I7I7I5BI7i7', state)
  return { time, start, used, limit }
end
