-- calendar_window: admits `limit` units in each window of the calendar, such as a month; nothing carries over.
--
-- Numbers
--   limit   units  1 .. 2^53 - 1  in each window
--   first   us     -2^53 ..   where a window starts: us since the epoch, negative before 1970
--   second  us     above first: where it ends, and the next one starts
--   stop    us     above second, .. 2^53: where that one ends
--   The script knows no calendar: the caller passes two consecutive windows, and it uses the one that contains now. If
--   now is in neither, the error is STALE, which ends with now_us=<us>: nothing was charged or written, and the call
--   can be repeated with the windows around that time. So it is if now is in the second window and the state's time
--   after it: the windows around now show whether that is too far ahead.
--   packed: BI7i7i7i7: 3, these
--
-- State; inspect lists time, used, limit, window
--   time I7 us, used I7, expiry I5 s, 3 B, limit I7, its window's start i7 us, and what keys.lua notes
--
-- Formula
--   used: what was taken since the window's start; a cost is admitted if used + cost <= limit; waits end with it
--   A state counts in the window that contains its time, whatever limit and window it was written under.
--
-- Source
--   The counter per window of Redis's INCR documentation.
--
-- Expiry
--   The window's end plus an hour (or the window's length, if less), since a clock may step back across the end.

-- The short way of plain acquires, on states that were written under their numbers, in the same window.
if live and #shape == 38 and not shared and find(shape, '^\3') and find(shape, '\128\0', 30, true) == 30 and KEYS[1]
  and (not each or #each == 10 * #KEYS) then
  local _, limit, start, ends, stop, _, _, cost = unpacked('<BI7i7i7i7BBI7', shape)
  local in_order = start < ends and ends < stop and stop <= 2^53
  if now >= ends then start, ends = ends, stop end
  local numbers, calls, reset, latest = pack('<BI7i7', 3, limit, start), 1, ends - now, nil
  latest, missed = ends + math.min(ends - start, 3600000000) + 1000000, not in_order
  states = KEYS[2] and call('MGET', unpack(KEYS))
    or { call('GET', KEYS[1]) }
  for index, held in ipairs(missed and {} or states) do
    if each then calls, cost = unpacked('<I3I7', each, index * 10 - 9) end
    if held and #held == 34 and calls == 1 and cost > 0 and cost <= limit and find(held, numbers, 20, true) == 20 then
      local time, used, armed = unpacked('<I7I7I5', held)
      local fits, expires = used + cost <= limit, armed * 1000000
      if fits then used = used + cost end
      local writes = fits and expires >= ends and expires <= latest
      if time >= start and time <= now and now < ends and now >= start and used <= limit
        and (not fits and expires >= ends or writes
          and call('SETRANGE', KEYS[index], '0', pack('<I7I7', now, used))) then
        answers[index] = pack('<i7i7i7i3', limit - used, reset, fits and 0 or reset, writes and 1 or 0)
      end
    end
    missed = missed or not answers[index]
  end
  if not missed then return table.concat(answers) end
end

-- As token_bucket.lua describes it: x is the units in use, y nothing.
ALGORITHMS[3] = {
  name = 'calendar_window', arguments = 'limit, first, second, stop',
  size = 29, format = '<BI7i7i7i7', width = 15, stored = '<BI7i7', numbers_at = 20, front = '<I7I7',
  stale = 'STALE calendar_window: expected two windows around now, got others; now_us=%.0f',
  -- The window that contains now: its start and end, the end of the next one if that is known, and the state's numbers;
  -- no numbers if neither does.
  window = function(limit, first, second, stop)
    if first >= second or second >= stop or stop > 2^53 then return first, first, 0, '' end
    if now >= first and now < second then return first, second, stop, pack('<BI7i7', 3, limit, first) end
    if now >= second and now < stop then return second, stop, 0, pack('<BI7i7', 3, limit, second) end
    return first, second, stop, nil
  end,
  spans = function(limit, _, start, ends, stop)
    if limit < 1 or limit >= 2^53 or start < -2^53 or start >= ends then return end
    return math.max(ends - start, stop - ends), ends - now + math.min(ends - start, 3600000000)
  end,
  level = function(held, now, longest, start)
    if not held then return 0, 0, nil, now, 0 end
    local time, used, armed, _, limit, began = unpacked('<I7I7I5BI7i7', held)
    if time > 2^53 or used > 2^53 or began > time or limit > 2^53 then return end
    if time < start then used = 0 end
    return used, used, nil, time > now and time - now <= longest and used > 0 and time or now, armed, time
  end,
  -- A state of another window or limit: the limit as it has it; nothing, and why, if the call's windows don't show
  -- which window it belongs to.
  other = function(limit, held, numbers, as_is, afresh)
    local start, ends, stop = limit.a, limit.b, limit.c
    local given, longest, own = limit, limit.longest, ALGORITHMS[3]
    local used, _, _, at, armed, time = own.level(held, now, longest, start)
    local ahead
    if not used then return nil end
    if time >= ends and used > 0 and stop > 0 and time < stop and time - now <= longest then
      -- The state's time counts as now, in the next window.
      local copy = {}
      for name, value in pairs(limit) do copy[name] = value end
      limit = copy
      limit.a, limit.b, limit.c, limit.numbers = ends, stop, 0, pack('<BI7i7', 3, limit.most, ends)
      limit.kept = stop - now + math.min(stop - ends, 3600000000)
      start = ends
    elseif time >= ends and used > 0 and stop == 0 then
      return nil, string.format(own.stale, now)
    elseif time >= ends and used > 0 then
      at, ahead = now, time - now
    end
    local _, was_limit, began = unpacked('<BI7i7', numbers)
    -- Brought back to now, it is of another window, though of no other numbers.
    if ahead then start = time < stop and ends or began end
    if was_limit ~= limit.most or began ~= start then
      if as_is and used > 0 then used = math.min(math.max(limit.most - was_limit + used, 0), 2^53) end
      if afresh then used = 0 end
      if used == 0 then limit, at = given, now end
    end
    return limit, used, used, nil, at, armed, time, ahead
  end,
  wait = function(units, used, _, _, _, ends) return used > units and ends - now or 0 end,
  take = function(units, used, _, at, _, ends)
    used = used + units
    return used, nil, at, used, used > 0 and ends - now or 0
  end,
  rare = function(own)
    own.give = function(units, newer, used, _, at)
      local left = math.max(used - units, math.min(used, newer), 0)
      return left, nil, at, used - left
    end
    -- Nothing of a call is owed once its window has ended.
    own.after = function(since, _, used, _, _, start) return 0, since >= start and used or 0 end
    own.addable = function(used) return 2^53 - used end
  end,
}
