-- fixed_window: admits `rate` units in each window of `period`; unused ones roll over up to `capacity`.
--
-- ARGV, before cost, mode and now_us
--   ARGV[1] capacity  units  0 .. 2^53  the most that can be taken at one instant; rate: nothing rolls over
--   ARGV[2] rate      units  1 .. 2^53  added at the start of each window
--   ARGV[3] period    us     1 .. 2^51  a window's length
--   ARGV[4] start     us     0 .. period - 1: windows start there after the epoch; -1: at the first hit
--   ARGV[5] max_debt  units  0 .. 2^53  how far a reservation may go below zero
--   capacity + max_debt + rate <= 2^53, and the longest reset,
--   ceil((capacity + max_debt) / rate) windows, at most 2^51 us (71 years)
--   packed: BI7I7I7i7I7I7: the layout (3), these, cost
--
-- Reply of inspect
--   [7] time_us         us     when the state was written
--   [8] window_us       us     the start of its window
--   [9] level           units  negative in debt
--   [10] state_capacity units  the numbers it was written under
--   [11] state_rate     units
--   [12] state_period   us
--
-- Formula
--   level(now) = min(capacity, level + windows begun since * rate)
--   allowed    : cost <= level
--   retry_after: to the start of the window ceil((cost - level) / rate) later
--   reserve    : cost <= level + max_debt
--   refund     : level + cost, capacity at most, whichever window it was taken in; penalty: level - cost, 2^53 - rate
--                or 2^51 us below capacity at most
--   reset_after: to the start of the window ceil((capacity - level) / rate) later
--   changed numbers keep what was used: at most capacity, or capacity + max_debt if the key is in debt. What a penalty
--                took beyond that is forgiven. a change of max_debt alone doesn't count
--   A window from the first hit is followed by others of its length until the level is at capacity.
--
-- Source
--   The counter per window of Redis's INCR documentation; roll-over as in the Convex rate limiter.

local NAME, ARGUMENTS, LENGTH, RESERVES = 'fixed_window', 'capacity, rate, period, start, max_debt', 43, true
local STATE, LAYOUT_AT, LAYOUT = 48, 27, 3
if packed and #packed == LENGTH then layout, a, b, c, d, e, cost = struct.unpack('<BI7I7I7i7I7I7', packed) end
local capacity, rate, period, start, max_debt = a, b, c, d, e
local span = capacity + max_debt
local longest, aligned = (span + -span % rate) / rate * period, start >= 0
local whole = packed or capacity % 1 + rate % 1 + period % 1 + start % 1 + max_debt % 1 == 0
local valid = whole and (layout or LAYOUT) == LAYOUT and (packed or #ARGV == 8)
  and capacity >= 0 and rate >= 1 and period >= 1 and start >= -1 and start < period and max_debt >= 0
  and span <= 2^53 - rate and longest <= 2^51
-- The numbers in a state, and its length: with a debt, that too, and a layout 8 above.
local numbers, size = nil, STATE
if valid and max_debt > 0 then
  numbers, size = struct.pack('<BI7I7I7I7', LAYOUT + 8, capacity, rate, period, max_debt), STATE + 7
elseif valid then
  numbers = packed and string.sub(packed, 1, STATE - LAYOUT_AT + 1)
    or struct.pack('<BI7I7I7', LAYOUT, capacity, rate, period)
end
-- The window that contains now.
local current = aligned and now_us - (now_us - start) % period or now_us

-- The fast path: a state in the window that contains now, in no debt and not full.
fast = fast and valid and cost > 0 and cost % 1 == 0
if fast and key_count > 1 then states, answers = redis.call('MGET', unpack(KEYS)), {} end
local calls, answer, latest = 1, nil, now_us + 2 * longest + 1000000
for index = 1, fast and key_count or 0 do
  if states then state = states[index] else state = redis.call('GET', KEYS[1]) end
  if several then cost, calls = struct.unpack('<I7I3', several, (index - 1) * EACH + 1) end
  if state and #state == size and string.find(state, numbers, LAYOUT_AT, true)
    and (not several or calls == 1 and cost > 0 and not repeated[index]) then
    local time, window, level, armed = struct.unpack('<I7i7i7I5', state)
    if time <= now_us and window <= time and level >= 0 and level < capacity
      and (window == current or not aligned and now_us - window < period) then
      local units = cost
      if unusual then
        if gives and capacity - level <= cost then
          redis.call('DEL', KEYS[index])
          return { 1, capacity, capacity, 0, 0 }
        elseif peeks and cost <= level then
          local resets = window + (capacity - level + (level - capacity) % rate) / rate * period
          return { 1, capacity, level, 0, resets - now_us }
        end
        units = gives and -cost or most_of and math.min(cost, math.max(level, 1)) or cost
      end
      local missing = units - level
      if missing <= 0 then
        level = level - units
        local reset_after = window + (capacity - level + (level - capacity) % rate) / rate * period - now_us
        local expires = armed * 1000000
        if expires >= now_us + reset_after and expires <= latest then
          redis.call('SETRANGE', KEYS[index], '0', struct.pack('<I7i7i7', now_us, window, level))
          answer = packed and struct.pack('<i7i7', level, reset_after)
            or { 1, capacity, level, 0, reset_after, most_of and units or nil }
          if remembers then
            answer.since, answer.missing, answer.parts, answer.version = window, capacity - level, 1, version_of(numbers)
          end
        end
      elseif units <= capacity and not forced then
        local reset_after = window + (capacity - level + (level - capacity) % rate) / rate * period - now_us
        local retry_after = window + (missing + -missing % rate) / rate * period - now_us
        answer = packed and struct.pack('<i7i7i7i7', -1 - level, reset_after, retry_after, 0)
          or { 0, capacity, level, retry_after, reset_after, most_of and 0 or nil }
      end
    end
  end
  if not answer then missed = true elseif states then answers[index], answer = answer, nil else return answer end
end

-- The decision is made at `time`: now, or the state's own time if now lies before it. Where another version is charged,
-- whether that may put it into debt: the key is in debt under the call's numbers, or these allow less debt.
local time, window, level, lends

-- Until the start of the window by which this many units have been added.
local function until_added(units) return window + (units + -units % rate) / rate * period - now_us end

-- What can be taken now, and how long until the key is as if never used.
local function levels()
  return math.max(level, 0), level < capacity and until_added(capacity - level) or 0
end

-- The lowest level at which it and the time to refill it are still exact.
local function lowest() return capacity - math.min(2^53 - rate, (2^51 - 2^51 % period) / period * rate) end

function restore(state, blocked, as_is, afresh)
  local changed, ahead, armed, version, was_capacity, was_rate, was_period = false, 0, 0, nil, nil, nil, nil
  time, window, level = now_us, current, capacity
  if not state then return 0, false, 0, levels() end
  time, window, level, armed, version, was_capacity, was_rate, was_period = struct.unpack('<I7i7i7I5BI7I7I7', state)
  if version ~= LAYOUT and version ~= LAYOUT + 8 or time > 2^53 or window > time or window < -2^53
    or was_capacity > 2^53 or was_period < 1 or was_rate < 1 or level > was_capacity or level < -2^53 then
    return
  end
  -- Changed numbers: what was used stays used, as of the state's own time. That puts no key into debt.
  -- Where nothing is used, windows may start anywhere.
  local moved = was_period ~= period or (aligned and level < was_capacity and (window - start) % period ~= 0)
  if moved or level == was_capacity then window = aligned and time - (time - start) % period or time end
  if moved or was_capacity ~= capacity or was_rate ~= rate then
    local least = level < 0 and -max_debt or 0
    if not as_is or level == was_capacity then level = capacity - (was_capacity - level) end
    level = afresh and capacity or math.min(capacity, math.max(level, least))
    changed = true
  elseif level < 0 then
    level = math.max(level, lowest())
  end
  if time <= now_us then
    time = now_us
  elseif level == capacity and not blocked then
    time, window = now_us, current
  elseif time - now_us > longest then
    time, window, ahead = now_us, current, time - now_us
  end
  local begun = time - window
  if begun >= period then
    begun = (begun - begun % period) / period
    level, window = math.min(capacity, level + begun * rate), window + begun * period
  end
  if level == capacity and not aligned then window = time end
  return armed, changed, ahead, levels()
end

function under(state)
  capacity, rate, period, start, max_debt = a, b, c, d, e
  if state then
    capacity, rate, period = struct.unpack('<I7I7I7', state, LAYOUT_AT + 1)
    max_debt = #state > STATE and struct.unpack('<I7', state, STATE + 1) or 0
    -- As far as the sums fit. Its windows begin as they did.
    max_debt = math.max(math.min(max_debt, 2^53 - rate - capacity), 0)
    lends = level < 0 or max_debt > e
    if aligned then start = struct.unpack('<i7', state, 8) % period end
  end
  span = capacity + max_debt
  longest = (span + -span % rate) / rate * period
  current = aligned and now_us - (now_us - start) % period or now_us
  return longest, capacity
end

function wait(units, debt)
  -- In this order no intermediate exceeds 2^53.
  local missing = units - debt - level
  return missing > 0 and until_added(missing) or 0
end

function remaining_after_debt() return level < 0 and math.min(level % rate, capacity) or level end

-- What is owed of these units, which left so many missing in the window that began at `since`: what has been added is
-- not.
function owed(units, since, missed, _, resets)
  local begun = math.max(window - since, 0)
  local left = missed - (begun - begun % period) / period * rate
  if resets then left = (resets - window + -(resets - window) % period) / period * rate end
  return math.max(math.min(units, left), 0)
end

function move(units, mode)
  if mode == 'refund' then
    units = -math.min(units, capacity - level)
  elseif mode == 'penalty' then
    units = math.min(units, level - lowest())
  elseif mode == 'other' then
    units = math.min(units, level - lowest(), math.max(level + (lends and max_debt or 0), 0))
  end
  level = level - units
  return units ~= 0, levels()
end

function taken() return window, capacity - level, 1 end

function write() return struct.pack('<I7i7i7', time, window, level), numbers end

function inspect(state)
  local time, window, level, _, _, capacity, rate, period = struct.unpack('<I7i7i7I5BI7I7I7', state)
  return { time, window, level, capacity, rate, period }
end
