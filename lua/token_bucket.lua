-- token_bucket: admits `rate` units per `period`, continuously, up to `capacity` at one instant. Also known as GCRA.
--
-- Numbers
--   capacity  units  0 .. 2^53  the most that can be taken at one instant
--   rate      units  1 .. 2^53  that pass in each period
--   period    ticks  1 .. 2^53
--   tick      us     1 .. 10^6  1 unless the products below don't fit
--   max_debt  units  0 .. 2^53  how far a reservation may go beyond the capacity
--   (capacity + max_debt + 1) * period + rate <= 2^53, and the longest reset,
--   ceil((capacity + max_debt) * period / rate) ticks, at most 2^51 us (71 years)
--   packed: BI7I7I7I3I7: 1, these
--
-- State; inspect lists time, lead, capacity, rate, period, tick
--   time I7 us, lead I7, expiry I5 s, the numbers but for max_debt as the call packs them, and what keys.lua notes
--
-- Formula
--   The units in use are kept as the lead of the theoretical arrival time over `time`, in parts of which a unit has
--   `period` and a tick passes `rate`, so that it is a whole number:
--   lead(now) = max(0, lead - ticks since `time` * rate)
--   used      = ceil(lead / period); a cost is admitted if used + cost <= capacity, and adds cost * period
--   wait      until at most u units are used: ceil((lead - u * period) / rate) ticks
--   Say 5 units at once, and one comes back in a second: capacity 5, rate 1, period 1000000, tick 1. Unused, at
--   0 s a cost of 3 is allowed: the lead is 3000000 then, 2 remain, and the reset is 3 s. At 1 s the lead is 2000000
--   and 2 are used: a cost of 4 is denied, until 1 is used: (2000000 - 1 * 1000000) / 1 ticks, a second.
--
-- Source
--   ITU-T I.371, Generic Cell Rate Algorithm, virtual scheduling; as a bucket: Turner, "New directions in
--   communications", IEEE Communications Magazine 24(10), 1986.

-- The short way of plain acquires, on states that were written under their numbers, in ticks of a microsecond.
if live and #shape == 41 and not shared and find(shape, '^\1') and find(shape, '\1\0\0', 23, true) == 23
  and find(shape, '\128\0', 33, true) == 33 and KEYS[1] and (not each or #each == 10 * #KEYS) then
  local _, capacity, rate, period, _, debt, _, _, cost = unpacked('<BI7I7I7I3I7BBI7', shape)
  local numbers, full, calls, latest = sub(shape, 1, 25), capacity * period, 1, nil
  latest, missed = now + 2 * (full + debt * period) / rate + 1000000, full + debt * period > 2^53 - period - rate
  states = KEYS[2] and call('MGET', unpack(KEYS))
    or { call('GET', KEYS[1]) }
  for index, held in ipairs(missed and {} or states) do
    if each then calls, cost = unpacked('<I3I7', each, index * 10 - 9) end
    if held and #held == 44 and calls == 1 and cost > 0 and cost <= capacity and find(held, numbers, 20, true) then
      local time, lead, armed = unpacked('<I7I7I5', held)
      local passed = (now - time) * rate
      lead = passed < lead and lead - passed or 0
      -- In this order nothing exceeds 2^53.
      local early, expires, spare = lead - (full - cost * period), armed * 1000000, full - lead
      if early <= 0 then lead, spare = lead + cost * period, -early end
      local reset = (lead + -lead % rate) / rate
      local writes = early <= 0 and expires >= now + reset and expires <= latest
      if time <= now and spare >= 0
        and (early > 0 or writes and call('SETRANGE', KEYS[index], '0', pack('<I7I7', now, lead))) then
        answers[index] = pack('<i7i7i7i3', (spare - spare % period) / period, reset,
          early > 0 and (early + -early % rate) / rate or 0, writes and 1 or 0)
      end
    end
    missed = missed or not answers[index]
  end
  if not missed then return table.concat(answers) end
end

-- What keys.lua and decide.lua call. A state is passed on as x, y and `at`: here x is the lead, y nothing, and `at` the
-- time as of which that is the lead. The limit's numbers but for the first come last: rate, period and tick. Other
-- algorithms have the same functions, and their files say what x and y are there.
ALGORITHMS[1] = {
  name = 'token_bucket', arguments = 'capacity, rate, period, tick, max_debt',
  -- A limit's numbers in the shape; of them so many bytes in a state, from there on; and what a state begins with.
  lends = true, size = 32, format = '<BI7I7I7I3I7', width = 25, stored = '<BI7I7I7I3', numbers_at = 20, front = '<I7I7',
  -- The longest reset, how long a state is kept, and the units that pass in a microsecond; nothing if out of range.
  spans = function(capacity, debt, rate, period, tick)
    local span = (capacity + debt) * period
    if rate < 1 or period < 1 or tick < 1 or tick > 1000000 or span > 2^53 - period - rate then return end
    local longest = (span + -span % rate) / rate * tick
    if longest <= 2^51 then return longest, 2 * longest, rate / (period * tick) end
  end,
  -- What a state comes to: the units in use, the lead, and as of when; then its expiry and its own time.
  level = function(held, now, longest, rate, period, tick)
    local here = now - now % tick
    if not held then return 0, 0, nil, here, 0 end
    local time, lead, armed = unpacked('<I7I7I5', held)
    local at = here
    -- No penalty makes it take longer than 2^51 us.
    if time > 2^53 or lead > 2^53 or lead / rate * tick > 2^51 + tick then return end
    if time <= here then
      local passed = (here - time) / tick * rate
      lead = passed < lead and lead - passed or 0
    elseif time - now <= longest and lead > 0 then
      at = time
    end
    return (lead + -lead % period) / period, lead, nil, at, armed, time
  end,
  -- How long until at most so many units are in use. In this order nothing exceeds 2^53, and no fractional quotient of
  -- whole numbers up to there is rounded to a whole.
  wait = function(units, lead, _, at, rate, period, tick)
    local early = lead - units * period
    return early > 0 and (early / rate + -early / rate % 1) * tick + at - now or 0
  end,
  -- Takes units. Those taken of an idle bucket count from the end of a coarse tick: they would be back too early from
  -- its start. Returns the state, the units in use, and how long until there are none.
  take = function(units, lead, _, at, rate, period, tick)
    if units > 0 and lead <= rate and at < now then at = at + tick end
    lead = lead + units * period
    local reset = lead > 0 and (lead / rate + -lead / rate % 1) * tick + at - now or 0
    return lead, nil, at, (lead + -lead % period) / period, reset
  end,
  -- What few calls need, and is defined for them only.
  rare = function(own)
    -- Gives units back that so many newer ones follow, as far as they are in use. Returns the state, and how many.
    own.give = function(units, newer, lead, _, at, _, period)
      local left = math.max(lead - units * period, math.min(lead, newer * period), 0)
      return left, nil, at, (lead - left - (lead - left) % period) / period
    end
    -- The units that were taken after a call at `since` that answered a reset at `resets`, and how many the call may
    -- give back.
    own.after = function(since, resets, lead, _, at, rate, period, tick)
      local left = (resets - at + -(resets - at) % tick) / tick * rate
      -- A reset is rounded up to a tick, in which several units may pass.
      if rate > period then left = left - rate + 1 end
      local newer = lead - math.max(left, 0)
      return newer > 0 and (newer + -newer % period) / period or 0, 2^53
    end
    -- The most units that may be added: numbers and waits stay exact.
    own.addable = function(lead, _, rate, period, tick)
      local rest = 2^51 % tick
      local more = math.min(2^53 - period, (2^51 - rest) / tick * rate + math.floor(rest * rate / tick)) - lead
      return more > 0 and (more - more % period) / period or 0
    end
    -- The same units under other numbers. A part of a unit is rounded up: a * b / c, of which the product may not fit.
    own.convert = function(lead, _, at, _, was_period, _, rate, period, tick)
      local rest, part, remainder = lead % was_period, 0, 0
      for exponent = 52, 0, -1 do
        part, remainder = part * 2, remainder * 2
        if remainder >= was_period then part, remainder = part + 1, remainder - was_period end
        local lacks = was_period - (period % (2 * 2^exponent) >= 2^exponent and rest or 0)
        if remainder >= lacks then
          part, remainder = part + 1, remainder - lacks
        else
          remainder = remainder + was_period - lacks
        end
      end
      if remainder > 0 then part = part + 1 end
      local units, most = (lead - rest) / was_period, own.addable(0, nil, rate, period, tick)
      return units < most and units * period + part or most * period, nil, at + -at % tick
    end
  end,
}
