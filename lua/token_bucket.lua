-- token_bucket: admits `rate` units per `period`, continuously, up to `capacity` at one instant.
--
-- ARGV, before cost, mode and now_us
--   ARGV[1] capacity  units  0 .. 2^53  the most that can be taken at one instant
--   ARGV[2] rate      units  1 .. 2^53  refilled in each period
--   ARGV[3] period    ticks  1 .. 2^53
--   ARGV[4] tick      us     1 .. 10^6  1 unless the products below don't fit
--   ARGV[5] max_debt  units  0 .. 2^53  how far a reservation may go below zero
--   (capacity + max_debt + 1) * period + rate <= 2^53, and the longest reset,
--   ceil((capacity + max_debt) * period / rate) ticks, at most 2^51 us (71 years)
--   packed: BI7I7I7I3I7I7: the layout (1), these, cost
--
-- Reply of inspect
--   [7] time_us         us     when the state was written
--   [8] level           1/period of a unit, negative in debt
--   [9] state_capacity  units  it was written under this one
--   [10] state_rate     units  and this rate
--   [11] state_period   ticks  in this period
--   [12] state_tick     us     of this tick
--
-- Formula
--   level is kept in units * period, so that one tick refills exactly `rate`:
--   level(now) = min(capacity * period, level + ticks since time * rate)
--   allowed    : cost * period <= level
--   retry_after: ceil((cost * period - level) / rate) ticks
--   reserve    : cost * period <= level + max_debt * period
--   refund     : level + cost * period, full at most; penalty: level - cost * period,
--                2^53 or 2^51 us below full at most
--   reset_after: ceil((capacity * period - level) / rate) ticks
--   changed numbers keep what was used: at most capacity, or capacity + max_debt if the key is in debt. What a penalty
--                took beyond that is forgiven. a change of max_debt alone doesn't count
--
-- Source
--   Turner, "New directions in communications", IEEE Communications Magazine 24(10), 1986;
--   as a meter: RFC 2697.

local NAME, ARGUMENTS, LENGTH, RESERVES = 'token_bucket', 'capacity, rate, period, tick, max_debt', 39, true
local STATE, LAYOUT_AT, LAYOUT = 44, 20, 1
if packed and #packed == LENGTH then layout, a, b, c, d, e, cost = struct.unpack('<BI7I7I7I3I7I7', packed) end
local capacity, rate, period, tick, max_debt = a, b, c, d, e
local full, deepest = capacity * period, (capacity + max_debt) * period
-- From the deepest debt to full.
local longest = (deepest + -deepest % rate) / rate * tick
local whole = packed or capacity % 1 + rate % 1 + period % 1 + tick % 1 + max_debt % 1 == 0
local valid = whole and (layout or LAYOUT) == LAYOUT and (packed or #ARGV == 8)
  and capacity >= 0 and rate >= 1 and period >= 1 and tick >= 1 and tick <= 1000000 and max_debt >= 0
  and deepest <= 2^53 - period - rate and longest <= 2^51
-- The numbers in a state, and its length: with a debt, that too, and a layout 8 above.
local numbers, size = nil, STATE
if valid and max_debt > 0 then
  numbers, size = struct.pack('<BI7I7I7I3I7', LAYOUT + 8, capacity, rate, period, tick, max_debt), STATE + 7
elseif valid then
  numbers = packed and string.sub(packed, 1, STATE - LAYOUT_AT + 1)
    or struct.pack('<BI7I7I7I3', LAYOUT, capacity, rate, period, tick)
end

-- The fast path: a bucket that is in no debt.
fast = fast and valid and cost > 0 and cost % 1 == 0 and tick == 1
if fast and key_count > 1 then states, answers = redis.call('MGET', unpack(KEYS)), {} end
local calls, latest, answer = 1, now_us + 2 * longest + 1000000, nil
for index = 1, fast and key_count or 0 do
  if states then state = states[index] else state = redis.call('GET', KEYS[1]) end
  if several then cost, calls = struct.unpack('<I7I3', several, (index - 1) * EACH + 1) end
  if state and #state == size and string.find(state, numbers, LAYOUT_AT, true)
    and (not several or calls == 1 and cost > 0 and not repeated[index]) then
    local time, level, armed = struct.unpack('<I7i7I5', state)
    if time <= now_us and level >= 0 and level <= full then
      local refill = (now_us - time) * rate
      level = refill < full - level and level + refill or full
      local units = cost
      if unusual then
        local remaining = (level - level % period) / period
        if gives and full - level <= cost * period then
          if level < full then redis.call('DEL', KEYS[index]) end
          return { 1, capacity, capacity, 0, 0 }
        elseif peeks and cost <= remaining then
          return { 1, capacity, remaining, 0, (full - level + (level - full) % rate) / rate }
        end
        units = gives and -cost or most_of and math.min(cost, math.max(remaining, 1)) or cost
      end
      local missing = units * period - level
      if missing <= 0 then
        level = level - units * period
        local expires, reset_after = armed * 1000000, (full - level + (level - full) % rate) / rate
        if expires >= now_us + reset_after and expires <= latest then
          redis.call('SETRANGE', KEYS[index], '0', struct.pack('<I7i7', now_us, level))
          local remaining = (level - level % period) / period
          answer = packed and struct.pack('<i7i7', remaining, reset_after)
            or { 1, capacity, remaining, 0, reset_after, most_of and units or nil }
          if remembers then
            answer.since, answer.missing, answer.parts, answer.version = now_us, full - level, period, version_of(numbers)
          end
        end
      elseif units <= capacity and not forced then
        local remaining, retry_after = (level - level % period) / period, (missing + -missing % rate) / rate
        local reset_after = (full - level + (level - full) % rate) / rate
        answer = packed and struct.pack('<i7i7i7i7', -1 - remaining, reset_after, retry_after, 0)
          or { 0, capacity, remaining, retry_after, reset_after, most_of and 0 or nil }
      end
    end
  end
  if not answer then missed = true elseif states then answers[index], answer = answer, nil else return answer end
end

-- The level is as of `time`: the tick of now, or the state's own time if now lies before it. Where another version is
-- charged, whether that may put it into debt: the key is in debt under the call's numbers, or these allow less debt. Of
-- a refund: what it gives back at most, if that is known.
local time, level, lends, still

-- What can be taken now, and how long until the key is as if never used.
local function levels()
  local used = full - level
  return level > 0 and (level - level % period) / period or 0,
    used > 0 and time + (used / rate + -used / rate % 1) * tick - now_us or 0
end

-- The lowest level at which it and the time to refill it are still exact.
local function lowest()
  local rest = 2^51 % tick
  local deepest = math.min(2^53, (2^51 - rest) / tick * rate + math.floor(rest * rate / tick))
  return full - deepest + deepest % period
end

function restore(state, blocked, as_is, afresh, scaled)
  local now, changed, ahead, armed = now_us - now_us % tick, false, 0, 0
  time, level, still = now, full, nil
  if not state then return 0, false, 0, levels() end
  local version, was_capacity, was_rate, was_period, was_tick
  time, level, armed, version, was_capacity, was_rate, was_period, was_tick = struct.unpack('<I7i7I5BI7I7I7I3', state)
  if version ~= LAYOUT and version ~= LAYOUT + 8 or time > 2^53 or was_capacity * was_period > 2^53 or was_period < 1
    or was_rate < 1 or was_tick < 1 or level > was_capacity * was_period or level < -2^53 then
    return
  end
  if was_period ~= period or was_capacity ~= capacity or was_rate ~= rate or was_tick ~= tick then
    -- What was used stays used, as of the state's own time. That puts no key into debt.
    local used, least = was_capacity * was_period - level, level < 0 and -max_debt * period or 0
    local rest = used % was_period
    local units = (as_is and used > 0 and was_capacity or capacity) - (used - rest) / was_period
    local part = scaled(rest, period, was_period)
    level = (afresh or units > capacity) and full or math.max(units * period - part, least)
    time, changed = time + -time % tick, true
  end
  if level < 0 then level = math.max(level, lowest()) end
  if time <= now then
    -- Inexact only if far above what is missing.
    local refill = (now - time) / tick * rate
    time, level = now, refill < full - level and level + refill or full
  elseif level == full and not blocked then
    time = now
  else
    ahead = time - now > longest and time - now or 0
    time = time - ahead
  end
  return armed, changed, ahead, levels()
end

function under(state)
  capacity, rate, period, tick, max_debt = a, b, c, d, e
  if state then
    capacity, rate, period, tick = struct.unpack('<I7I7I7I3', state, LAYOUT_AT + 1)
    max_debt = #state > STATE and struct.unpack('<I7', state, STATE + 1) or 0
    -- As far as the products fit.
    local most = 2^53 - rate
    max_debt = math.max(math.min(max_debt, (most - most % period) / period - 1 - capacity), 0)
    lends = level < 0 or max_debt > e
  end
  full, deepest = capacity * period, (capacity + max_debt) * period
  longest = (deepest + -deepest % rate) / rate * tick
  return longest, capacity
end

function wait(units, debt)
  -- In this order nothing exceeds 2^53, and no fractional quotient of whole numbers up to there is rounded to a whole.
  local missing = units * period - debt * period - level
  return missing > 0 and time + (missing / rate + -missing / rate % 1) * tick - now_us or 0
end

-- What is owed of these units, which left so much missing at `since`, in parts of a unit: what has been refilled is
-- not.
function owed(units, since, missed, parts, resets)
  if parts ~= period then missed = math.floor(missed / parts) * period end
  local left = missed - math.max(time - since, 0) / tick * rate
  if resets then left = (resets - time + -(resets - time) % tick) / tick * rate end
  still = math.max(math.min(units * period, left), 0)
  return still, period
end

function move(units, mode)
  local taken = units * period
  if mode == 'refund' then
    taken = -math.min(taken, full - level, still or taken)
  elseif mode == 'penalty' then
    taken = math.min(taken, level - lowest())
  elseif mode == 'other' then
    taken = math.min(taken, level - lowest(), math.max(level + (lends and max_debt * period or 0), 0))
  end
  -- Within a coarse tick a full bucket was not refilling: the time is rounded up, not down.
  if taken > 0 and time < now_us and full - level <= rate then time = time + tick end
  level = level - taken
  return taken ~= 0, levels()
end

function taken() return time, full - level, period end

function write() return struct.pack('<I7i7', time, level), numbers end

function inspect(state)
  local time, level, _, _, capacity, rate, period, tick = struct.unpack('<I7i7I5BI7I7I7I3', state)
  return { time, level, capacity, rate, period, tick }
end
