-- fixed_window: admits `rate` units in each window of `period`; unused ones roll over up to `capacity`.
--
-- Numbers
--   capacity  units  0 .. 2^53  the most that can be taken at one instant; rate: nothing rolls over
--   rate      units  1 .. 2^53  that pass at the start of each window
--   period    us     1 .. 2^51  a window's length
--   start     us     0 .. period - 1: windows start there after the epoch; -1: at the first hit
--   max_debt  units  0 .. 2^53  how far a reservation may go beyond the capacity
--   capacity + max_debt + rate <= 2^53, and the longest reset, ceil((capacity + max_debt) / rate) windows, at most
--   2^51 us (71 years)
--   packed: BI7I7I7i7I7: 2, these
--
-- State; inspect lists time, used, window, capacity, rate, period, start
--   time I7 us, used I7, window i7 us, expiry I5 s, the numbers but for max_debt, and what keys.lua notes
--
-- Formula
--   used(now) = max(0, used - windows begun since * rate); a cost is admitted if used + cost <= capacity
--   wait      until at most u units are used: to the start of the window ceil((used - u) / rate) later
--   Windows from the first hit follow each other until nothing is used.
--
-- Source
--   The counter per window of Redis's INCR documentation; roll-over as in the Convex rate limiter.

-- The short way of plain acquires, on states that were written under their numbers, in the same window.
if live and #shape == 45 and not shared and find(shape, '^\2') and find(shape, '\128\0', 37, true) == 37 and KEYS[1]
  and (not each or #each == 10 * #KEYS) then
  local _, capacity, rate, period, _, debt, _, _, cost = unpacked('<BI7I7I7i7I7BBI7', shape)
  local numbers, span, calls, latest = sub(shape, 1, 29), capacity + debt, 1, nil
  latest, missed = now + 2 * (span + -span % rate) / rate * period + 1000000, span > 2^53 - rate
  states = KEYS[2] and call('MGET', unpack(KEYS))
    or { call('GET', KEYS[1]) }
  for index, held in ipairs(missed and {} or states) do
    if each then calls, cost = unpacked('<I3I7', each, index * 10 - 9) end
    if held and #held == 55 and calls == 1 and cost > 0 and cost <= capacity and find(held, numbers, 27, true) then
      local time, used, window, armed = unpacked('<I7I7i7I5', held)
      local early, expires, spare = used - (capacity - cost), armed * 1000000, capacity - used
      if early <= 0 then used, spare = used + cost, -early end
      local reset = window + (used + -used % rate) / rate * period - now
      local writes = early <= 0 and expires >= now + reset and expires <= latest
      if time <= now and window <= time and now - window < period and spare >= 0
        and (early > 0 or writes and call('SETRANGE', KEYS[index], '0', pack('<I7I7', now, used))) then
        local retry = early > 0 and window + (early + -early % rate) / rate * period - now or 0
        answers[index] = pack('<i7i7i7i3', spare, reset, retry, writes and 1 or 0)
      end
    end
    missed = missed or not answers[index]
  end
  if not missed then return table.concat(answers) end
end

-- As token_bucket.lua describes it: x is the units in use, y the start of their window.
ALGORITHMS[2] = {
  name = 'fixed_window', arguments = 'capacity, rate, period, start, max_debt', lends = true,
  size = 36, format = '<BI7I7I7i7I7', width = 29, stored = '<BI7I7I7i7', numbers_at = 27, front = '<I7I7i7',
  spans = function(capacity, debt, rate, period, start)
    local span = capacity + debt
    if rate < 1 or period < 1 or start < -1 or start >= period or span > 2^53 - rate then return end
    local longest = (span + -span % rate) / rate * period
    if longest <= 2^51 then return longest, 2 * longest, rate / period end
  end,
  level = function(held, now, longest, rate, period, start)
    local at, used, window, armed, time = now, 0, now, 0, nil
    if held then
      time, used, window, armed = unpacked('<I7I7i7I5', held)
      -- No penalty makes it take longer than 2^51 us.
      if time > 2^53 or used > 2^53 or used / rate * period > 2^51 or window > time or window < -2^53 then return end
      local begun = time - window
      if time <= now then
        begun = now - window
      elseif time - now <= longest then
        at = time
      else
        window, begun = start >= 0 and now - (now - start) % period or now, 0
      end
      if begun >= period then
        begun = (begun - begun % period) / period
        used, window = math.max(used - begun * rate, 0), window + begun * period
      end
    end
    if used == 0 then at, window = now, start >= 0 and now - (now - start) % period or now end
    return used, used, window, at, armed, time
  end,
  wait = function(units, used, window, _, rate, period)
    local early = used - units
    return early > 0 and window + (early + -early % rate) / rate * period - now or 0
  end,
  take = function(units, used, window, at, rate, period)
    used = used + units
    return used, window, at, used, used > 0 and window + (used + -used % rate) / rate * period - now or 0
  end,
  rare = function(own)
    own.give = function(units, newer, used, window, at)
      local left = math.max(used - units, math.min(used, newer), 0)
      return left, window, at, used - left
    end
    -- What the call left may have passed in part with the window that it was in.
    own.after = function(since, resets, used, window, _, rate, period)
      local left = (resets - window - (resets - window) % period) / period * rate
      if since < window then left = left - rate + 1 end
      return math.max(used - math.max(left, 0), 0), 2^53
    end
    own.addable = function(used, _, rate, period)
      return math.max(math.min(2^53 - rate, (2^51 - 2^51 % period) / period * rate) - used, 0)
    end
    -- What can be taken when no more than the capacity is in use again.
    own.spare = function(debt, rate) return -debt % rate end
    -- Windows of one length that start at other times count from the later start: otherwise, two versions in turn
    -- would admit more than either.
    own.convert = function(used, window, at, _, was_period, _, rate, period, start)
      local begun = start >= 0 and at - (at - start) % period or at
      if used > 0 and period == was_period and (start < 0 or window > begun) then begun = window end
      return math.min(used, own.addable(0, nil, rate, period)), begun, at
    end
  end,
}
