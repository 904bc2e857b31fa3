-- sliding_window_counter: admits up to `limit` units, the previous window's count weighted by its overlap plus the
-- current window's.
--
-- Numbers
--   limit   units  1 .. 2^53
--   period  ticks  1 .. 2^53  a window's length; windows start at multiples of it since the epoch
--   tick    us     1 .. 10^6  1 unless the products below don't fit
--   (limit + 1) * period <= 2^53, and the longest reset, two windows, at most 2^51 us (71 years)
--   packed: BI7I7I3: 4, these
--
-- State; inspect lists time, previous, current, limit, period, tick
--   time I7 us, previous I7, current I7, expiry I5 s, the numbers, and what keys.lua notes
--
-- Formula
--   With W the window and e its elapsed part, in ticks:
--   used = floor(previous * (W - e) / W) + current; a cost is admitted if used + cost <= limit
--   wait   until at most u units are used: R = u - current >= 0: W - floor(((R + 1) W - 1) / previous) - e
--          else: 2 W - floor(((u + 1) W - 1) / current) - e
--   Under other numbers whose windows are as long, both counts stay; else what is used moves to the current window.
--
-- Source
--   Cloudflare, "How we built rate limiting capable of scaling to millions of domains", 2017; the waits are solved from
--   it for whole ticks.

-- Until at most so many units are left of a count, in the window after its own or, with 2 windows, the one after that.
local function until_left(units, count, windows, at, period, tick)
  local weighs = (units + 1) * period - 1
  return at - at % (period * tick) + (windows * period - (weighs - weighs % count) / count) * tick - now
end

-- The short way of plain acquires, on states that were written under their numbers, in ticks of a microsecond.
if live and #shape == 27 and not shared and find(shape, '^\4') and find(shape, '\1\0\0\128\0', 16, true) == 16
  and KEYS[1] and (not each or #each == 10 * #KEYS) then
  local _, limit, period, _, _, _, cost = unpacked('<BI7I7I3BBI7', shape)
  missed = false
  local numbers, begun, calls = sub(shape, 1, 18), now - now % period, 1
  states = KEYS[2] and call('MGET', unpack(KEYS))
    or { call('GET', KEYS[1]) }
  for index, held in ipairs(states) do
    if each then calls, cost = unpacked('<I3I7', each, index * 10 - 9) end
    if held and #held == 44 and calls == 1 and cost > 0 and cost <= limit and find(held, numbers, 27, true) == 27 then
      local time, previous, current, armed = unpacked('<I7I7I7I5', held)
      if time < begun then previous, current = time >= begun - period and current or 0, 0 end
      local weighted, room, wait, reset = previous * (period - now + begun), limit - cost, 0, 0
      local used = (weighted - weighted % period) / period + current
      if used == 0 then previous = 0 end
      if used <= room then
        used, current = used + cost, current + cost
      elseif room >= current then
        wait = until_left(room - current, previous, 1, now, period, 1)
      else
        wait = until_left(room, current, 2, now, period, 1)
      end
      if current > 0 then reset = until_left(0, current, 2, now, period, 1)
      elseif used > 0 then reset = until_left(0, previous, 1, now, period, 1) end
      local expires = armed * 1000000
      local writes = wait == 0 and expires >= now + reset and expires <= now + 4 * period + 1000000
      if time <= now and used <= limit and previous * period <= 2^53
        and (wait > 0 or writes and call('SETRANGE', KEYS[index], '0', pack('<I7I7I7', now, previous, current))) then
        answers[index] = pack('<i7i7i7i3', limit - used, reset, wait, writes and 1 or 0)
      end
    end
    missed = missed or not answers[index]
  end
  if not missed then return table.concat(answers) end
end

-- As token_bucket.lua describes it: x and y are the counts of the previous and the current window.
ALGORITHMS[4] = {
  name = 'sliding_window_counter', arguments = 'limit, period, tick',
  size = 18, format = '<BI7I7I3', width = 18, stored = '<BI7I7I3', numbers_at = 27, front = '<I7I7I7',
  -- What is above another version's limit doesn't fit its windows: it stays in those that it was taken in.
  bounded = true,
  spans = function(limit, _, period, tick)
    local longest = 2 * period * tick
    if limit < 1 or period < 1 or tick < 1 or tick > 1000000 or limit * period > 2^53 - period then return end
    if longest <= 2^51 then return longest, 2 * longest, limit / (period * tick) end
  end,
  level = function(held, now, longest, period, tick)
    local at, length = now - now % tick, period * tick
    if not held then return 0, 0, 0, at, 0 end
    local time, previous, current, armed = unpacked('<I7I7I7I5', held)
    if time > 2^53 or previous * period > 2^53 or current * period > 2^53 then return end
    local begun, rebased = at - at % length, time - now > longest
    if time <= at then
      if time < begun then previous, current = time >= begun - length and current or 0, 0 end
    else
      begun = time - time % length
      if not rebased then at = time end
    end
    local weighted = previous * (period - ((rebased and time or at) - begun) / tick)
    local used = (weighted - weighted % period) / period + current
    if rebased then
      used = math.min(used, math.floor(2^53 / period) - 1)
      previous, current = 0, used
    end
    if used == 0 then previous, current, at = 0, 0, now - now % tick end
    return used, previous, current, at, armed, time
  end,
  wait = function(units, previous, current, at, period, tick)
    local weighted = previous * (period - at % (period * tick) / tick)
    if (weighted - weighted % period) / period + current <= units then return 0 end
    if units >= current then return until_left(units - current, previous, 1, at, period, tick) end
    return until_left(units, current, 2, at, period, tick)
  end,
  take = function(units, previous, current, at, period, tick)
    current = current + units
    local weighted, reset = previous * (period - at % (period * tick) / tick), 0
    local used = (weighted - weighted % period) / period + current
    if current > 0 then
      reset = until_left(0, current, 2, at, period, tick)
    elseif used > 0 then
      reset = until_left(0, previous, 1, at, period, tick)
    end
    return previous, current, at, used, reset
  end,
  -- The units in both counts, whatever they weigh.
  counted = function(previous, current) return previous + current end,
  rare = function(own)
    own.give = function(units, newer, previous, current, at)
      local of_current = math.max(math.min(newer + units, current) - newer, 0)
      local before = math.max(newer - current, 0)
      local of_previous = math.max(math.min(before + units - of_current, previous) - before, 0)
      return previous - of_previous, current - of_current, at, of_current + of_previous
    end
    -- Of a call, units of its window are owed.
    own.after = function(since, _, previous, current, at, period, tick)
      local begun = at - at % (period * tick)
      if since >= begun then return 0, current end
      return current, since >= begun - period * tick and previous or 0
    end
    own.addable = function(_, current, period) return math.max(0, math.floor(2^53 / period) - 1 - current) end
    own.convert = function(previous, current, at, was_period, was_tick, _, period, tick)
      local length, most = was_period * was_tick, math.floor(2^53 / period) - 1
      if length ~= period * tick then
        local weighted = previous * (was_period - at % length / was_tick)
        previous, current = 0, (weighted - weighted % was_period) / was_period + current
      end
      return math.min(previous, most), math.min(current, most), at - at % tick
    end
  end,
}
