-- token_bucket: admits `rate` units per `period`, continuously, up to `capacity` at one instant.
--
-- KEYS
--   KEYS[1]  the limit's state; packed, up to 7999 keys, as many as Lua unpacks
--
-- ARGV
--   ARGV[1] capacity  units  0 .. 2^53  the most that can be taken at one instant
--   ARGV[2] rate      units  1 .. 2^53  refilled in each period
--   ARGV[3] period    ticks  1 .. 2^53
--   ARGV[4] tick      us     1 .. 10^6  1 unless the products below don't fit
--   ARGV[5] max_debt  units  0 .. 2^53  how far a reservation may go below zero
--   ARGV[6] cost      units  0 ..       0 takes nothing; of a block, its length in us, up to 2^51, 0 to lift it
--   ARGV[7] mode      -      acquire | peek | reserve | at-most | refund | penalty | block | reset | inspect
--                            and its options: +as-is or +reset, +overage, +block=us with 1 .. 2^51 us
--   ARGV[8] now_us    us     0 .. 2^52, or -1 for the server's time
--   (capacity + max_debt + 1) * period + rate <= 2^53, and the longest reset,
--   ceil((capacity + max_debt) * period / rate) ticks, at most 2^51 us (71 years)
--   packed, to acquire for each of the keys by itself, with less work for the server:
--   [1] numbers  struct's BI7I7I7I3I7I7: the layout (1), capacity, rate, period, tick, max_debt, cost
--   [2] now_us   us     the server's time unless given
--   [3] several  for each key, where they differ or a key stands twice, struct's I7I3: the cost, and how many calls
--                of it; without it no key may stand twice: more than the limit would be admitted
--
-- Reply
--   [1] allowed         0 | 1
--   [2] limit           units  the capacity
--   [3] remaining       units  can be taken right now, after this decision
--   [4] retry_after_us  us     0: now, -1: never
--   [5] reset_after_us  us     until the key is as if never used
--   at-most appends:
--   [6] granted         units  taken, of the cost at most
--   inspect appends:
--   [6] ttl_ms          ms     PTTL: -2 without a key
--   [7] time_us         us     when the state was written
--   [8] level           1/period of a unit, negative in debt
--   [9] state_capacity  units  the numbers it was written under
--   [10] state_rate     units
--   [11] state_period   ticks
--   [12] state_tick     us
--   [13] blocked_us     us     until the block ends, 0 if not blocked
--   [14] overage        denied calls in the time of a longest reset from the first of them
--   a blocked key, also where this call blocked it, and +overage append last:
--   blocked_us, overage
--   packed, one string with struct's ddddd for each key: how many of its calls are allowed (-1: blocked; -2, among
--   several keys: it holds something else than this limit's state), limit, remaining, retry_after_us (of the first
--   call that isn't allowed), reset_after_us
--
-- Formula
--   level is kept in units * period, so that one tick refills exactly `rate`:
--   level(now) = min(capacity * period, level + ticks since time * rate)
--   allowed    : cost * period <= level
--   retry_after: ceil((cost * period - level) / rate) ticks; for a reservation the wait until it is covered
--   reserve    : cost * period <= level + max_debt * period
--   at-most    : as allowed, for min(cost, remaining) units, or for one where none remains
--   refund     : level + cost * period, full at most; penalty: level - cost * period, as low as stays exact: 2^53, or
--                2^51 us, below full
--   block      : denies every call until it ends; a refund or a penalty moves the level beneath it. +block: a denial
--                starts one, unless the key is blocked already or the cost could never be allowed
--   changed numbers keep what was used: at most capacity, or capacity + max_debt if the key is in debt. What a penalty
--                took beyond that is forgiven. max_debt alone is no changed number. +as-is: the level; +reset: nothing
--   reset_after: ceil((capacity * period - level) / rate) ticks
--   calls of a key: as many as fit one after the other
--
-- Source
--   Turner, "New directions in communications", IEEE Communications Magazine 24(10), 1986;
--   as a meter: RFC 2697.
--
-- Commands
--   TIME, GET, MGET; what takes or gives: SET, SETRANGE, PEXPIREAT; reset, and a refund of all: DEL; inspect: PTTL
--
-- Expiry
--   SET arms it for twice the longest reset, or this one if a penalty or a block made it longer, and up to a second;
--   SETRANGE keeps it while that covers this reset. A peek doesn't extend it after a change of numbers.
--
-- A deny writes
--   nothing, but for four cases: the state's time lay too far ahead and is brought back to now; the numbers have
--   changed so that the key would expire before it resets under the new ones, and its expiry alone is extended;
--   +overage counts it, and the expiry is extended where it would end before the count does; or +block blocks the key,
--   which is then written as a block writes it, unless it is blocked already or the cost could never be allowed.

-- Packed, ARGV begins with the numbers as a state ends with them, and what is asked is to acquire.
local packed = #ARGV < 5
local given = #KEYS
local read, numbers, layout, capacity, rate, period, tick, max_debt, cost, mode, now_us, several
if packed then
  numbers, mode, now_us, several = ARGV[1], 'acquire', -1, ARGV[3]
  if ARGV[2] then now_us = tonumber(ARGV[2]) end
  if numbers and #numbers == 39 then
    layout, capacity, rate, period, tick, max_debt, cost = struct.unpack('<BI7I7I7I3I7I7', numbers)
    numbers = string.sub(numbers, 1, 25)
    read = now_us
  end
else
  -- An argument that is missing or no number fails here, without a check of each.
  read, capacity, rate, period, tick, max_debt, cost, mode, now_us = pcall(function(ARGV)
    return ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0, ARGV[5] + 0, ARGV[6] + 0, ARGV[7], ARGV[8] + 0
  end, ARGV)
end

if not read or given == 0 then
  local expected, fault, at = 'capacity, rate, period, tick, max_debt, cost, mode, now_us', nil, 0
  for name in string.gmatch(expected, '[%a_]+') do
    at = at + 1
    if not fault and not ARGV[at] then fault = 'missing ' .. name end
    if not fault and name ~= 'mode' and not tonumber(ARGV[at]) then fault = name .. ' is no number' end
  end
  if packed and ARGV[1] and not tonumber(ARGV[1]) then
    expected, fault = 'numbers, now_us, several', layout and 'now_us is no number' or 'numbers are not 39 bytes'
  end
  if given == 0 then fault = 'missing KEYS[1]' end
  return redis.error_reply('BADARG token_bucket: expected ' .. expected .. '; ' .. fault)
end

-- A mode may carry options: how the rule treats changed numbers, that its denials are counted, and that they block.
local as_is, afresh, overage, block_for = false, false, false, false
if mode ~= 'acquire' then
  mode = string.gsub(mode, '%+[%a-]+=?%d*', function(option)
    as_is, afresh, overage = as_is or option == '+as-is', afresh or option == '+reset', overage or option == '+overage'
    local us = tonumber(string.match(option, '^%+block=(%d+)$'))
    if us and us >= 1 and us <= 2^51 and not block_for then
      block_for = us
      return ''
    end
    return (option == '+as-is' or option == '+reset' or option == '+overage') and '' or nil
  end)
end

local server_time = now_us == -1
local full, span = capacity * period, (capacity + max_debt) * period
local longest = (span + -span % rate) / rate * tick
local good = period >= 1 and tick >= 1 and tick <= 1000000 and span <= 2^53 - period - rate and longest <= 2^51
  and (server_time or now_us >= 0 and now_us <= 2^52 and now_us % 1 == 0)
if packed then
  good = good and layout == 1 and given <= 7999 and (not several or #several == 10 * given)
else
  good = good and cost >= 0 and cost % 1 == 0 and capacity >= 0 and rate >= 1 and max_debt >= 0
    and capacity % 1 + rate % 1 + period % 1 + tick % 1 + max_debt % 1 == 0
    and (mode == 'acquire' or mode == 'peek' or mode == 'reserve' or mode == 'at-most' or mode == 'refund'
      or mode == 'penalty' or mode == 'reset' or mode == 'inspect' or (mode == 'block' and cost <= 2^51))
  numbers = good and struct.pack('<BI7I7I7I3', 1, capacity, rate, period, tick)
end
if not good then
  return redis.error_reply('BADARG token_bucket: expected whole numbers in the ranges of its header and a mode, got '
    .. string.gsub(table.concat(ARGV, ' '), '[^ -~]', '?'))
end

if server_time then
  local clock = redis.call('TIME')
  now_us = clock[1] * 1000000 + clock[2]
end
local now = now_us - now_us % tick
local plain = mode == 'acquire' and not overage and not block_for
local brief, latest = packed and server_time and tick == 1, now_us + 2 * longest + 1000000

local count, calls = packed and given or 1, 1
local answers, seen
if count > 1 then answers, seen = redis.call('MGET', unpack(KEYS)), several and {} end
for index = 1, count do repeat
  local key, state = KEYS[index], nil
  if mode == 'reset' then
    redis.call('DEL', key)
    return { 1, capacity, capacity, 0, 0 }
  elseif count == 1 then
    state = redis.call('GET', key)
  else
    -- MGET has nothing of a key of another type, nor what this call has written since.
    state = answers[index]
    if not state or (seen and seen[key]) then
      state = redis.pcall('GET', key)
      -- Of another type, it is unreadable; anything else that is refused, such as by a missing permission, ends the call.
      if type(state) == 'table' and not string.find(state.err, '^WRONGTYPE') then
        return redis.error_reply(state.err .. ' command: get')
      end
    end
    if seen then seen[key] = true end
  end
  if several then cost, calls = struct.unpack('<I7I3', several, index * 10 - 9) end

  -- Most calls meet a state under these numbers and write in place, or nothing: what is said below, in fewer steps.
  if brief and state and calls == 1 and cost > 0 and #state == 44 and string.find(state, numbers, 20, true) then
    local time, level, armed = struct.unpack('<I7i7I5', state)
    if time <= now and level >= 0 and level <= full then
      local refill, answer = (now - time) * rate, nil
      level = refill < full - level and level + refill or full
      local missing = cost * period - level
      if missing <= 0 then
        level = level - cost * period
        local expires, reset_after = armed * 1000000, (full - level + (level - full) % rate) / rate
        if expires >= now + reset_after and expires <= latest then
          redis.call('SETRANGE', key, '0', struct.pack('<I7i7', now, level))
          answer = struct.pack('<ddddd', 1, capacity, (level - level % period) / period, 0, reset_after)
        end
      elseif cost <= capacity then
        answer = struct.pack('<ddddd', 0, capacity, (level - level % period) / period,
          (missing + -missing % rate) / rate, (full - level + (level - full) % rate) / rate)
      end
      if answer and count == 1 then return answer end
      if answer then
        answers[index] = answer
        break
      end
    end
  end

  local level, time, armed = full, now, 0
  local changed, rebased = false, false
  -- Only a key that is blocked, or whose denials are counted, has this tail.
  local noted, blocked_until, denied_since, denials = false, 0, 0, 0
  if state then
    if #state == 44 and string.find(state, numbers, 20, true) then
      time, level, armed = struct.unpack('<I7i7I5', state)
    else
      local version, was_capacity, was_rate, was_period, was_tick
      if #state == 44 or #state == 62 then
        time, level, armed, version, was_capacity, was_rate, was_period, was_tick =
          struct.unpack('<I7i7I5BI7I7I7I3', state)
        if #state == 62 then
          noted, blocked_until, denied_since, denials = true, struct.unpack('<I7I7I4', state, 45)
        end
      end
      if version ~= 1 or was_capacity * was_period > 2^53 or was_period < 1 or was_rate < 1 or was_tick < 1
        or level > was_capacity * was_period or level < -2^53 or blocked_until > 2^53 then
        time = math.huge
      elseif was_period ~= period or was_capacity ~= capacity or was_rate ~= rate or was_tick ~= tick then
        -- Changed numbers: what was used stays used, placed at the state's own time. Nobody is put into debt by it.
        local used = was_capacity * was_period - level
        local rest = used % was_period
        local whole, quotient = (used - rest) / was_period, rest
        if was_period ~= period then
          -- rest * period / was_period, rounded up. The product may not fit, so it is divided bit by bit.
          local remainder, left = 0, period
          quotient = 0
          for exponent = 52, 0, -1 do
            quotient = quotient * 2
            if remainder >= was_period - remainder then
              quotient, remainder = quotient + 1, remainder - (was_period - remainder)
            else
              remainder = remainder * 2
            end
            if left >= 2 ^ exponent then
              left = left - 2 ^ exponent
              if remainder >= was_period - rest then
                quotient, remainder = quotient + 1, remainder - (was_period - rest)
              else
                remainder = remainder + rest
              end
            end
          end
          if remainder > 0 then quotient = quotient + 1 end
        end
        local units = (as_is and used > 0 and was_capacity or capacity) - whole
        local lowest = level < 0 and full - span or 0
        level = (afresh or units > capacity) and full or math.max(units * period - quotient, lowest)
        time = time + -time % tick
        changed = true
      end
    end
    if time > 2^53 or level > full or level < -2^53 then
      if count == 1 then
        return redis.error_reply('BADSTATE token_bucket: the key holds something else than this limit\'s state')
      end
      answers[index] = struct.pack('<ddddd', -2, capacity, 0, 0, 0)
      break
    end

    if level < 0 then
      -- As low as a level may be, so that it and the time to refill it stay exact.
      local rest = 2^51 % tick
      local deepest = math.min(2^53, (2^51 - rest) / tick * rate + math.floor(rest * rate / tick))
      level = math.max(level, full - deepest + deepest % period)
    end

    if time <= now then
      -- Inexact only where it is far above what is missing.
      local refill = (now - time) / tick * rate
      level = refill < full - level and level + refill or full
      time = now
    elseif level == full and blocked_until <= now_us then
      time = now
    elseif time - now > longest then
      blocked_until = blocked_until - (time - now)
      time, rebased = now, true
    end
  end

  -- From here on `time` is the tick that the decision is made at: now, or the state's own while now lies before it.
  local remaining = level > 0 and (level - level % period) / period or 0
  local wanted, most, debt = cost, capacity, 0
  if mode == 'reserve' then
    most, debt = capacity + max_debt, span - full
  elseif mode == 'at-most' then
    wanted = math.min(cost, math.max(remaining, 1))
  end

  -- How many of the calls are allowed, and what they take from the level.
  local allowed, retry_after, reset_after = calls, 0, 0
  if wanted * calls > remaining then
    local missing = wanted * period - level
    if debt > 0 and missing <= debt then
      retry_after = time + (missing + -missing % rate) / rate * tick - now_us
    else
      allowed = (remaining - remaining % wanted) / wanted
    end
  end
  local taken = allowed * wanted * period

  local writes, blocked, counted, blocks, tail = true, false, false, false, ''
  if noted or not plain then
    if mode == 'block' then blocked_until = cost > 0 and now_us + cost or 0 end
    blocked = blocked_until > now_us
    writes = mode ~= 'peek' and mode ~= 'inspect'
    if mode == 'refund' then
      allowed, taken = 1, -math.min(cost * period, full - level)
    elseif mode == 'penalty' then
      -- As low as a level may be, as above.
      local rest = 2^51 % tick
      local deepest = math.min(2^53, (2^51 - rest) / tick * rate + math.floor(rest * rate / tick))
      allowed, taken = 1, math.min(cost * period, level - (full - deepest + deepest % period))
    elseif mode == 'block' then
      allowed, taken = 1, 0
    elseif blocked then
      allowed, taken, retry_after = 0, 0, 0
    elseif not writes then
      taken = 0
    end

    -- A denial blocks the key, but for one that no wait would end.
    if block_for and allowed == 0 and writes and not blocked and wanted <= most then
      blocked_until, blocked, blocks = now_us + block_for, true, true
    end
    if denials > 0 and (now_us < denied_since or now_us - denied_since >= longest) then denials = 0 end
    counted = overage and allowed == 0 and writes
    if counted then
      if denials == 0 then denied_since = now_us end
      denials = math.min(denials + 1, 2^32 - 1)
    end
    if blocked or denials > 0 then
      tail = struct.pack('<I7I7I4', blocked and blocked_until or 0, denied_since, denials)
    end
  end

  if taken ~= 0 then
    -- Within a coarse tick a full bucket has not been refilling: the time is rounded up, not down.
    if taken > 0 and time < now_us and full - level <= rate then time = time + tick end
    level = level - taken
    remaining = level > 0 and (level - level % period) / period or 0
  end
  if allowed < calls and wanted > 0 then
    -- The debt is subtracted first, and ceil(x / rate) is x / rate + -x / rate % 1: so nothing passes 2^53, and of whole
    -- numbers up to there no quotient is rounded to a whole number that isn't one.
    local missing = wanted * period - debt - level
    if wanted > most then
      retry_after = -1
    elseif missing > 0 then
      retry_after = time + (missing / rate + -missing / rate % 1) * tick - now_us
    end
  end
  local used = full - level
  if used > 0 then reset_after = time + (used / rate + -used / rate % 1) * tick - now_us end
  if blocked then
    remaining, reset_after = 0, math.max(reset_after, blocked_until - now_us)
    if allowed == 0 and retry_after >= 0 then retry_after = math.max(retry_after, blocked_until - now_us) end
  end

  local settles = taken ~= 0 or mode == 'block' or blocks
  if settles or changed or rebased or counted then
    -- Whether the key's expiry lies between what it has to outlive, this reset and the time of counted denials, and the
    -- longest that it may be armed for.
    local keep, least = 2 * longest, now_us + reset_after
    if reset_after > keep then keep = reset_after end
    if denials > 0 and denied_since + longest > least then least = denied_since + longest end
    local covered, last = server_time and armed * 1000000 >= least, now_us + keep
    if settles and used == 0 and tail == '' then
      redis.call('DEL', key)
    elseif settles or (rebased and writes) or (counted and not state) then
      if covered and not (changed or noted or tail ~= '') and armed * 1000000 <= last + 1000000 then
        redis.call('SETRANGE', key, '0', struct.pack('<I7i7', time, level))
      else
        local expiry, at = 'PXAT', 0
        if server_time then
          armed = (last + 1000000 - last % 1000000) / 1000000
          at = armed * 1000
        else
          -- The decision's time is not the server's: an hour at least, and the next call in server time arms it anew.
          armed, expiry, at = 0, 'PX', math.max(3600000, (keep + -keep % 1000) / 1000)
        end
        redis.call('SET', key, struct.pack('<I7i7I5', time, level, armed) .. numbers .. tail, expiry,
          string.format('%d', at))
      end
    else
      if counted and not server_time then
        -- As written, and kept for as long as anything that is decided at this time.
        redis.call('SET', key, string.sub(state, 1, 14) .. '\0\0\0\0\0' .. string.sub(state, 20, 44) .. tail, 'PX',
          string.format('%d', math.max(3600000, (keep + -keep % 1000) / 1000)))
      elseif counted then
        redis.call('SETRANGE', key, '44', tail)
      end
      if (changed or counted) and not covered and server_time and writes then
        -- Denied, and the key would expire before it resets under the new numbers, or before its denials are forgotten.
        armed = (last + 1000000 - last % 1000000) / 1000000
        -- In this order, since Redis refuses a SETRANGE, but no PEXPIREAT, where it is out of memory.
        redis.call('SETRANGE', key, '14', struct.pack('<I5', armed))
        redis.call('PEXPIREAT', key, string.format('%d', armed * 1000))
      end
    end
  end

  if packed then
    local answer = struct.pack('<ddddd', blocked and -1 or allowed, capacity, remaining, retry_after, reset_after)
    if count == 1 then return answer end
    answers[index] = answer
    break
  end
  local answer = { allowed, capacity, remaining, retry_after, reset_after }
  if mode == 'at-most' then
    answer[6] = taken / period
  elseif mode == 'inspect' then
    local ttl_ms, written = redis.call('PTTL', key), { now, full, 0, 0, capacity, rate, period, tick }
    if state then written = { struct.unpack('<I7i7I5BI7I7I7I3', state) } end
    for at, field in ipairs({ ttl_ms, written[1], written[2], written[5], written[6], written[7], written[8] }) do
      answer[5 + at] = field
    end
  end
  if blocked or overage or mode == 'inspect' then
    answer[#answer + 1] = blocked and blocked_until - now_us or 0
    answer[#answer + 1] = denials
  end
  return answer
until true end
return table.concat(answers)
