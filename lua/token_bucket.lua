-- token_bucket: token bucket (GCRA): `rate` units per `period`, continuously, up to `capacity` at one instant.
--
-- ARGV, before cost, mode and now_us
--   ARGV[1] capacity  units  0 .. 2^53  the burst: the most that can be taken at one instant
--   ARGV[2] rate      units  1 .. 2^53  refilled in each period
--   ARGV[3] period    ticks  1 .. 2^53
--   ARGV[4] tick      us     1 .. 10^6  1 unless the products below don't fit
--   ARGV[5] max_debt  units  0 .. 2^53  how far a reservation may go beyond the burst
--   (capacity + max_debt + 1) * period + rate <= 2^53, and the longest reset,
--   ceil((capacity + max_debt) * period / rate) ticks, at most 2^51 us (71 years)
--   packed: BI7I7I7I3I7I7: the layout (1), these, cost
--
-- Reply of inspect
--   [7] time_us         us     when the state was written
--   [8] lead            from time_us to the theoretical arrival time, in 1/rate of a tick
--   [9] state_capacity  units  the numbers it was written under
--   [10] state_rate     units
--   [11] state_period   ticks
--   [12] state_tick     us
--
-- Formula
--   lead is what is used, in 1/period of a unit, so that one tick refills exactly `rate`: of a bucket, what its level
--   lacks of `capacity * period`. In GCRA it is how far the theoretical arrival time lies ahead of `time`, in 1/rate of
--   a tick: a unit's emission interval is then `period`, and the burst tolerance `capacity * period`.
--   lead(now)  = max(0, lead - (ticks since `time`) * rate)
--   allowed    : cost * period <= capacity * period - lead
--   retry_after: ceil((cost * period - (capacity * period - lead)) / rate) ticks
--   reserve    : cost * period <= (capacity + max_debt) * period - lead
--   refund     : lead - cost * period, 0 at least; penalty: lead + cost * period, 2^53 or 2^51 us at most
--   reset_after: ceil(lead / rate) ticks
--   changed numbers keep what was used: at most capacity, or capacity + max_debt if the key is in debt. What a penalty
--                took beyond that is forgiven. A change of max_debt alone doesn't count
--
-- Source
--   Turner, "New directions in communications", IEEE Communications Magazine 24(10), 1986; as a meter: RFC 2697.
--   By arrival time: ITU-T I.371, Generic Cell Rate Algorithm, virtual scheduling.

local NAME, ARGUMENTS, LENGTH, RESERVES = 'token_bucket', 'capacity, rate, period, tick, max_debt', 39, true
local STATE, LAYOUT_AT, LAYOUT = 44, 20, 1
if packed and #packed == LENGTH then layout, a, b, c, d, e, cost = struct.unpack('<BI7I7I7I3I7I7', packed) end
local capacity, rate, period, tick, max_debt = a, b, c, d, e
local tolerance, span = capacity * period, (capacity + max_debt) * period
local longest = (span + -span % rate) / rate * tick
local whole = packed or capacity % 1 + rate % 1 + period % 1 + tick % 1 + max_debt % 1 == 0
local valid = whole and (layout or LAYOUT) == LAYOUT and (packed or #ARGV == 8)
  and capacity >= 0 and rate >= 1 and period >= 1 and tick >= 1 and tick <= 1000000 and max_debt >= 0
  and span <= 2^53 - period - rate and longest <= 2^51
-- The numbers in a state, and its length: with a debt, that too, and a layout 8 above.
local numbers, size = nil, STATE
if valid and max_debt > 0 then
  size, numbers = STATE + 7, struct.pack('<BI7I7I7I3I7', LAYOUT + 8, capacity, rate, period, tick, max_debt)
elseif valid then
  numbers = packed and string.sub(packed, 1, STATE - LAYOUT_AT + 1)
    or struct.pack('<BI7I7I7I3', LAYOUT, capacity, rate, period, tick)
end

-- The fast path: a lead within the tolerance.
fast = fast and valid and cost > 0 and cost % 1 == 0 and tick == 1
if fast and key_count > 1 then states, answers = redis.call('MGET', unpack(KEYS)), {} end
local latest, calls, answer = now_us + 2 * longest + 1000000, 1, nil
for index = 1, fast and key_count or 0 do
  if states then state = states[index] else state = redis.call('GET', KEYS[1]) end
  if several then cost, calls = struct.unpack('<I7I3', several, (index - 1) * EACH + 1) end
  if state and #state == size and string.find(state, numbers, LAYOUT_AT, true)
    and (not several or calls == 1 and cost > 0 and not repeated[index]) then
    local time, lead, armed = struct.unpack('<I7I7I5', state)
    if time <= now_us and lead <= tolerance then
      local caught_up = (now_us - time) * rate
      lead = caught_up < lead and lead - caught_up or 0
      local units = cost
      if unusual then
        local remaining = (tolerance - lead - (tolerance - lead) % period) / period
        if gives and lead <= cost * period then
          if lead > 0 then redis.call('DEL', KEYS[index]) end
          return { 1, capacity, capacity, 0, 0 }
        end
        if peeks and cost <= remaining then return { 1, capacity, remaining, 0, (lead + -lead % rate) / rate } end
        units = gives and -cost or most_of and math.min(cost, math.max(remaining, 1)) or cost
      end
      local early = lead - tolerance + units * period
      if early <= 0 then
        lead = lead + units * period
        local spare, expires, reset_after = tolerance - lead, armed * 1000000, (lead + -lead % rate) / rate
        if expires >= now_us + reset_after and expires <= latest then
          redis.call('SETRANGE', KEYS[index], '0', struct.pack('<I7I7', now_us, lead))
          local remaining = (spare - spare % period) / period
          answer = packed and struct.pack('<i7i7', remaining, reset_after)
            or { 1, capacity, remaining, 0, reset_after, most_of and units or nil }
          if remembers then
            answer.since, answer.missing, answer.parts, answer.version = now_us, lead, period, version_of(numbers)
          end
        end
      elseif units <= capacity and not forced then
        local spare, reset_after = tolerance - lead, (lead + -lead % rate) / rate
        local left, retry_after = (spare - spare % period) / period, (early + -early % rate) / rate
        answer = packed and struct.pack('<i7i7i7i7', -1 - left, reset_after, retry_after, 0)
          or { 0, capacity, left, retry_after, reset_after, most_of and 0 or nil }
      end
    end
  end
  if not answer then missed = true elseif states then answers[index], answer = answer, nil else return answer end
end

-- The decision is made at `time`: the tick of now, or the state's own time if now lies before it. Where another version
-- is charged, whether that may put it into debt: the key is in debt under the call's numbers, or these allow less debt.
-- Of a refund: the most of the lead that it takes away, if that is known.
local time, lead, lends, still

-- What can be taken now, and how long until the key is as if never used.
local function levels()
  local spare = tolerance - lead
  return spare > 0 and (spare - spare % period) / period or 0,
    lead > 0 and time + (lead / rate + -lead / rate % 1) * tick - now_us or 0
end

-- The largest lead for which the lead and the time until it has passed are exact.
local function furthest()
  local rest = 2^51 % tick
  local lead = math.min(2^53, (2^51 - rest) / tick * rate + math.floor(rest * rate / tick))
  return lead - lead % period
end

function restore(state, blocked, as_is, afresh, scaled)
  local now, changed, ahead, armed = now_us - now_us % tick, false, 0, 0
  time, lead, still = now, 0, nil
  if not state then return 0, false, 0, levels() end
  local version, was_capacity, was_rate, was_period, was_tick
  time, lead, armed, version, was_capacity, was_rate, was_period, was_tick = struct.unpack('<I7I7I5BI7I7I7I3', state)
  if version ~= LAYOUT and version ~= LAYOUT + 8 or time > 2^53 or lead > 2^53 or was_capacity * was_period > 2^53
    or was_period < 1 or was_rate < 1 or was_tick < 1 then
    return
  end
  if was_period ~= period or was_capacity ~= capacity or was_rate ~= rate or was_tick ~= tick then
    -- What was used stays used, as of the state's own time. That puts no key into debt.
    local most = lead > was_capacity * was_period and tolerance + max_debt * period or tolerance
    local rest = lead % was_period
    local units = (lead - rest) / was_period
    if as_is and lead > 0 then units = capacity - was_capacity + units end
    lead = (afresh or units < 0) and 0 or math.min(units * period + scaled(rest, period, was_period), most)
    time, changed = time + -time % tick, true
  end
  if lead > tolerance then lead = math.min(lead, furthest()) end
  if time <= now then
    -- Inexact only if far above the lead.
    local caught_up = (now - time) / tick * rate
    time, lead = now, caught_up < lead and lead - caught_up or 0
  elseif lead == 0 and not blocked then
    time = now
  elseif time - now > longest then
    time, ahead = now, time - now
  end
  return armed, changed, ahead, levels()
end

function under(state)
  if state then
    lends = lead > tolerance
    capacity, rate, period, tick = struct.unpack('<I7I7I7I3', state, LAYOUT_AT + 1)
    -- As far as the products fit.
    local most = 2^53 - rate
    most = (most - most % period) / period - 1 - capacity
    max_debt = math.min(#state > STATE and struct.unpack('<I7', state, STATE + 1) or 0, math.max(most, 0))
    lends = lends or max_debt > e
  else
    capacity, rate, period, tick, max_debt = a, b, c, d, e
  end
  tolerance, span = capacity * period, (capacity + max_debt) * period
  longest = (span + -span % rate) / rate * tick
  return longest, capacity
end

function wait(units, debt)
  -- The debt is subtracted first, and ceil(x / rate) is x / rate + -x / rate % 1, so nothing exceeds 2^53; and for
  -- whole numbers up to there, no fractional quotient is rounded to a whole number.
  local early = units * period - debt * period - (tolerance - lead)
  return early > 0 and time + (early / rate + -early / rate % 1) * tick - now_us or 0
end

-- What is owed of these units, which left this lead at `since`, in parts of a unit: what has passed of it is not.
function owed(units, since, led, parts, resets)
  if parts ~= period then led = math.floor(led / parts) * period end
  local left = led - math.max(time - since, 0) / tick * rate
  if resets then left = (resets - time + -(resets - time) % tick) / tick * rate end
  still = math.max(math.min(units * period, left), 0)
  return still, period
end

function move(units, mode)
  local change = units * period
  if mode == 'refund' then
    change = -math.min(change, lead, still or lead)
  elseif mode == 'penalty' then
    change = math.min(change, furthest() - lead)
  elseif mode == 'other' then
    change = math.min(change, furthest() - lead, math.max((lends and span or tolerance) - lead, 0))
  end
  -- `time` is now_us rounded down to a tick. What an idle key takes counts from the tick's end instead: counted from
  -- its start, it would be back up to a tick too early.
  if change > 0 and time < now_us and lead <= rate then time = time + tick end
  lead = lead + change
  return change ~= 0, levels()
end

function taken() return time, lead, period end

function write() return struct.pack('<I7I7', time, lead), numbers end

function inspect(state)
  local time, lead, _, _, capacity, rate, period, tick = struct.unpack('<I7I7I5BI7I7I7I3', state)
  return { time, lead, capacity, rate, period, tick }
end
