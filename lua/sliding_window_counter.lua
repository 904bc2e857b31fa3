-- sliding_window_counter: admits up to `limit` units, the previous window's count weighted by its overlap plus
-- the current window's.
--
-- ARGV, before cost, mode and now_us
--   ARGV[1] limit   units  1 .. 2^53
--   ARGV[2] period  ticks  1 .. 2^53  a window's length; windows start at multiples of it since the epoch
--   ARGV[3] tick    us     1 .. 10^6  1 unless the products below don't fit
--   (limit + 1) * period <= 2^53, and the longest reset, two windows, at most 2^51 us (71 years)
--   packed: BI7I7I3I7: the layout (4), these, cost
--
-- Reply of inspect
--   [7] time_us         us     when the state was written
--   [8] previous        units  taken in the window before the current one
--   [9] current         units  taken in the current window
--   [10] state_limit    units  the numbers it was written under
--   [11] state_period   ticks
--   [12] state_tick     us
--
-- Formula
--   With W the window and e its elapsed part, in ticks:
--   used       = floor(previous * (W - e) / W) + current
--   allowed    : used + cost <= limit
--   retry_after: with R = limit - current - cost,
--                R >= 0: W - floor(((R + 1) W - 1) / previous) - e
--                else:   2 W - floor(((limit - cost + 1) W - 1) / current) - e
--   refund     : from current, then from previous, whichever window it was taken in; penalty: current + cost, as much
--                as stays exact
--   reset_after: current > 0:  2 W - floor((W - 1) / current) - e
--                used > 0:    W - floor((W - 1) / previous) - e
--   changed numbers keep what was used, up to limit
--
-- Source
--   Cloudflare, "How we built rate limiting capable of scaling to millions of domains", 2017;
--   the waits are solved from it for whole ticks.

local NAME, ARGUMENTS, LENGTH, RESERVES = 'sliding_window_counter', 'limit, period, tick', 25, false
local STATE, LAYOUT_AT, LAYOUT = 44, 27, 4
if packed and #packed == LENGTH then layout, a, b, c, cost = struct.unpack('<BI7I7I3I7', packed) end
local limit, period, tick = a, b, c
local length = period * tick
local longest = 2 * length
local whole = packed or limit % 1 + period % 1 + tick % 1 == 0
local valid = whole and (layout or LAYOUT) == LAYOUT and (packed or #ARGV == 6)
  and limit >= 1 and period >= 1 and tick >= 1 and tick <= 1000000
  and limit * period <= 2^53 - period and longest <= 2^51
local numbers = valid and (packed and string.sub(packed, 1, STATE - LAYOUT_AT + 1)
  or struct.pack('<BI7I7I3', LAYOUT, limit, period, tick))

-- The fast path: a state in the window that contains now, or before it.
fast = fast and valid and cost > 0 and cost % 1 == 0 and tick == 1 and not gives
if fast and key_count > 1 then states, answers = redis.call('MGET', unpack(KEYS)), {} end
local calls, answer, begun, latest = 1, nil, now_us - now_us % period, now_us + 2 * longest + 1000000
for index = 1, fast and key_count or 0 do
  if states then state = states[index] else state = redis.call('GET', KEYS[1]) end
  if several then cost, calls = struct.unpack('<I7I3', several, (index - 1) * EACH + 1) end
  if state and #state == STATE and string.find(state, numbers, LAYOUT_AT, true)
    and (not several or calls == 1 and cost > 0 and not repeated[index]) then
    local time, previous, current, armed = struct.unpack('<I7I7I7I5', state)
    if time <= now_us and previous * period <= 2^53 and current * period <= 2^53 then
      if time < begun then previous, current = time >= begun - period and current or 0, 0 end
      local weighted = previous * (period - (now_us - begun))
      local left = limit - (weighted - weighted % period) / period - current
      local units = cost
      if most_of then units = math.min(cost, math.max(left, 1)) end
      if peeks and left >= cost then
        local used, leaves, reset_after = current, 2 * period, 0
        if current == 0 then used, leaves = previous, period end
        if left < limit then reset_after = begun + leaves - (period - 1 - (period - 1) % used) / used - now_us end
        answer = { 1, limit, left, 0, reset_after }
      elseif left >= units then
        current = current + units
        local reset_after = begun + 2 * period - (period - 1 - (period - 1) % current) / current - now_us
        local remaining, expires = left - units, armed * 1000000
        if expires >= now_us + reset_after and expires <= latest then
          redis.call('SETRANGE', KEYS[index], '0', struct.pack('<I7I7I7', now_us, previous, current))
          answer = packed and struct.pack('<i7i7', remaining, reset_after)
            or { 1, limit, remaining, 0, reset_after, most_of and units or nil }
          if remembers then answer.since, answer.version = now_us, version_of(numbers) end
        end
      elseif units <= limit and not forced then
        -- The units that leave, by when all of them have left, and how many of them may stay.
        local leaving, leaves, stay = previous, period, limit - current - units
        if stay < 0 then leaving, leaves, stay = current, 2 * period, limit - units end
        stay = (stay + 1) * period - 1
        local remaining, retry_after = math.max(left, 0), begun + leaves - (stay - stay % leaving) / leaving - now_us
        leaving, leaves = current, 2 * period
        if current == 0 then leaving, leaves = previous, period end
        local reset_after = begun + leaves - (period - 1 - (period - 1) % leaving) / leaving - now_us
        answer = packed and struct.pack('<i7i7i7i7', -1 - remaining, reset_after, retry_after, 0)
          or { 0, limit, remaining, retry_after, reset_after, most_of and 0 or nil }
      end
    end
  end
  if not answer then missed = true elseif states then answers[index], answer = answer, nil else return answer end
end

-- The decision is made at `time`, in the window that begins at `window`: the tick of now, or the state's own time if
-- now lies before it.
local time, window, previous, current
-- Whether a refund is of units taken in the previous window.
local older

-- A window's weighted count at a time, relative to the start of the next window.
local function weight(count, time, period, tick)
  local weighted = count * (period - time / tick)
  return (weighted - weighted % period) / period
end

-- Until at most `stay` of these units still weigh, in the window after theirs or the one after that.
local function until_left(units, windows, stay)
  local weighs = (stay + 1) * period - 1
  return window + (windows * period - (weighs - weighs % units) / units) * tick - now_us
end

local function used() return weight(previous, time - window, period, tick) + current end

-- What can be taken now, and how long until the key is as if never used.
local function levels()
  local used, reset_after = used(), 0
  if current > 0 then
    reset_after = until_left(current, 2, 0)
  elseif used > 0 then
    reset_after = until_left(previous, 1, 0)
  end
  return math.max(limit - used, 0), reset_after
end

function restore(state, blocked, as_is, afresh, _, mode)
  local now, changed, ahead, armed = now_us - now_us % tick, false, 0, 0
  time, previous, current, window, older = now, 0, 0, now - now % length, false
  if not state then return 0, false, 0, limit, 0 end
  local version, was_limit, was_period, was_tick
  time, previous, current, armed, version, was_limit, was_period, was_tick = struct.unpack('<I7I7I7I5BI7I7I3', state)
  if version ~= LAYOUT or time > 2^53 or was_period < 1 or was_tick < 1 or was_limit * was_period > 2^53
    or previous * was_period > 2^53 or current * was_period > 2^53 then
    return
  end
  local was_length = was_period * was_tick
  local used = weight(previous, time % was_length, was_period, was_tick) + current
  -- A state in which nothing was used is like no state: counts that weigh nothing can't be given back.
  if mode == 'refund' and used == 0 and not blocked then previous = 0 end
  changed = was_limit ~= limit or was_length ~= length or was_tick ~= tick
  if time > now or changed then
    local fits = was_length == length and used <= limit and previous <= limit
    if changed and (as_is or afresh) then
      used = (afresh or used == 0) and 0 or limit - math.min(math.max(was_limit - used, 0), limit)
      fits = false
    end
    -- Another clock or other numbers: what was used at the state's own time stays used. If the two counts can't express
    -- it under the new numbers, it is placed in one window.
    if changed then
      time = time - time % tick
      if fits then used = weight(previous, time % length, period, tick) + current end
    end
    if time > now and used == 0 and not blocked then
      time, previous, current = now, 0, 0
    elseif time - now > longest then
      time, ahead, previous, current = now, time - now, 0, math.min(used, limit)
    elseif changed and not fits then
      previous, current = 0, math.min(used, limit)
    end
    time = time - time % tick
  end
  if time <= now then
    if time < window then previous, current = time >= window - length and current or 0, 0 end
    time = now
  else
    window = time - time % length
  end
  return armed, changed, ahead, levels()
end

function under(state)
  limit, period, tick = a, b, c
  if state then limit, period, tick = struct.unpack('<I7I7I3', state, LAYOUT_AT + 1) end
  numbers = struct.pack('<BI7I7I3', LAYOUT, limit, period, tick)
  length = period * tick
  longest = 2 * length
  return longest, limit
end

function wait(units)
  local stay = limit - current - units
  if used() + units <= limit then return 0 end
  return stay >= 0 and until_left(previous, 1, stay) or until_left(current, 2, limit - units)
end

-- What is owed of these units, which were taken at `since`: nothing once the window after theirs has ended.
function owed(units, since)
  if since >= window then return math.min(units, current) end
  older = since >= window - length
  return older and math.min(units, previous) or 0
end

function move(units, mode)
  if older then
    previous = previous - units
    return true, levels()
  elseif mode == 'refund' then
    units = -math.min(units, previous + current)
  elseif mode == 'penalty' or mode == 'other' then
    units = math.min(units, math.max(0, math.floor(2^53 / period) - 1 - current))
  end
  current = current + units
  -- The newest units are given back first.
  if current < 0 then previous, current = previous + current, 0 end
  return units ~= 0, levels()
end

function write() return struct.pack('<I7I7I7', time, previous, current), numbers end

function inspect(state)
  local time, previous, current, _, _, limit, period, tick = struct.unpack('<I7I7I7I5BI7I7I3', state)
  return { time, previous, current, limit, period, tick }
end
