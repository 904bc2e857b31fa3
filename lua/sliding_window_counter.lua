-- sliding_window_counter: admits up to `limit` units, the previous window's count weighted by its overlap plus
-- the current window's.
--
-- KEYS
--   KEYS[1]  the limit's state; packed, up to 7999 keys, as many as Lua unpacks
--
-- ARGV
--   ARGV[1] limit   units  1 .. 2^53
--   ARGV[2] period  ticks  1 .. 2^53  a window's length; windows start at multiples of it since the epoch
--   ARGV[3] tick    us     1 .. 10^6  1 unless the products below don't fit
--   ARGV[4] cost    units  0 ..       0 takes nothing; of a block, its length in us, up to 2^51, 0 to lift it
--   ARGV[5] mode    -      acquire | peek | at-most | refund | penalty | block | reset | inspect
--                          and its options: +as-is or +reset, +overage, +block=us with 1 .. 2^51 us
--   ARGV[6] now_us  us     0 .. 2^52, or -1 for the server's time
--   (limit + 1) * period <= 2^53, and the longest reset, two windows, at most 2^51 us (71 years)
--   packed, to acquire for each of the keys by itself, with less work for the server:
--   [1] numbers  struct's BI7I7I3I7: the layout (4), limit, period, tick, cost
--   [2] now_us   us     the server's time unless given
--   [3] several  for each key, where they differ or a key stands twice, struct's I7I3: the cost, and how many calls
--                of it; without it no key may stand twice: more than the limit would be admitted
--
-- Reply
--   [1] allowed         0 | 1
--   [2] limit           units
--   [3] remaining       units  can be taken right now, after this decision
--   [4] retry_after_us  us     0: now, -1: never
--   [5] reset_after_us  us     until the weighted count is 0 for good
--   at-most appends:
--   [6] granted         units  taken, of the cost at most
--   inspect appends:
--   [6] ttl_ms          ms     PTTL: -2 without a key
--   [7] time_us         us     when the state was written
--   [8] previous        units  taken in the window before the current one
--   [9] current         units  taken in the current window
--   [10] state_limit    units  the numbers it was written under
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
--   With W the window and e its elapsed part, in ticks:
--   used       = floor(previous * (W - e) / W) + current
--   allowed    : used + cost <= limit
--   retry_after: with R = limit - current - cost,
--                R >= 0: W - floor(((R + 1) W - 1) / previous) - e
--                else:   2 W - floor(((limit - cost + 1) W - 1) / current) - e
--   at-most    : as allowed, for min(cost, remaining) units, or for one where none remains
--   refund     : from current, then from previous, whichever window it was taken in; penalty: current + cost, as much
--                as stays exact
--   block      : denies every call until it ends; a refund or a penalty moves the counts beneath it. +block: a denial
--                starts one, unless the key is blocked already or the cost could never be allowed
--   changed numbers keep what was used, up to limit; +as-is: what was left; +reset: nothing
--   reset_after: current > 0:  2 W - floor((W - 1) / current) - e
--                used > 0:    W - floor((W - 1) / previous) - e
--   calls of a key: as many as fit one after the other
--
-- Source
--   Cloudflare, "How we built rate limiting capable of scaling to millions of domains", 2017;
--   the waits are solved from it for whole ticks.
--
-- Commands
--   TIME, GET, MGET; what takes or gives: SET, SETRANGE, PEXPIREAT; reset, and a refund of all: DEL; inspect: PTTL
--
-- Expiry
--   SET arms it for twice the longest reset, or this one if a block made it longer, and up to a second; SETRANGE keeps
--   it while that covers this reset. A peek doesn't extend it after a change of numbers.
--
-- A deny writes
--   nothing, but for four cases: the state's time lay too far ahead and is brought back to now; the numbers have
--   changed so that the key would expire before it resets under the new ones, and its expiry alone is extended;
--   +overage counts it, and the expiry is extended where it would end before the count does; or +block blocks the key,
--   which is then written as a block writes it, unless it is blocked already or the cost could never be allowed.

-- Packed, ARGV begins with the numbers as a state ends with them, and what is asked is to acquire.
local packed = #ARGV < 5
local given = #KEYS
local read, numbers, layout, limit, period, tick, cost, mode, now_us, several
if packed then
  numbers, mode, now_us, several = ARGV[1], 'acquire', -1, ARGV[3]
  if ARGV[2] then now_us = tonumber(ARGV[2]) end
  if numbers and #numbers == 25 then
    layout, limit, period, tick, cost = struct.unpack('<BI7I7I3I7', numbers)
    numbers = string.sub(numbers, 1, 18)
    read = now_us
  end
else
  -- An argument that is missing or no number fails here, without a check of each.
  read, limit, period, tick, cost, mode, now_us = pcall(function(ARGV)
    return ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0, ARGV[5], ARGV[6] + 0
  end, ARGV)
end

if not read or given == 0 then
  local expected, fault, at = 'limit, period, tick, cost, mode, now_us', nil, 0
  for name in string.gmatch(expected, '[%a_]+') do
    at = at + 1
    if not fault and not ARGV[at] then fault = 'missing ' .. name end
    if not fault and name ~= 'mode' and not tonumber(ARGV[at]) then fault = name .. ' is no number' end
  end
  if packed and ARGV[1] and not tonumber(ARGV[1]) then
    expected, fault = 'numbers, now_us, several', layout and 'now_us is no number' or 'numbers are not 25 bytes'
  end
  if given == 0 then fault = 'missing KEYS[1]' end
  return redis.error_reply('BADARG sliding_window_counter: expected ' .. expected .. '; ' .. fault)
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
local length = period * tick
local longest = 2 * length
local good = limit >= 1 and period >= 1 and tick >= 1 and tick <= 1000000 and limit * period <= 2^53 - period
  and longest <= 2^51 and (server_time or now_us >= 0 and now_us <= 2^52 and now_us % 1 == 0)
if packed then
  good = good and layout == 4 and given <= 7999 and (not several or #several == 10 * given)
else
  good = good and cost >= 0 and cost % 1 == 0 and limit % 1 + period % 1 + tick % 1 == 0
    and (mode == 'acquire' or mode == 'peek' or mode == 'at-most' or mode == 'refund' or mode == 'penalty'
      or mode == 'reset' or mode == 'inspect' or (mode == 'block' and cost <= 2^51))
  numbers = good and struct.pack('<BI7I7I3', 4, limit, period, tick)
end
if not good then
  return redis.error_reply('BADARG sliding_window_counter: expected whole numbers in the ranges of its header '
    .. 'and a mode, got ' .. string.gsub(table.concat(ARGV, ' '), '[^ -~]', '?'))
end

if server_time then
  local clock = redis.call('TIME')
  now_us = clock[1] * 1000000 + clock[2]
end
local now = now_us - now_us % tick
local begun = now - now % length
local plain = mode == 'acquire' and not overage and not block_for
local brief, latest = packed and server_time and tick == 1, now_us + 2 * longest + 1000000

local count, calls = packed and given or 1, 1
local answers, seen
if count > 1 then answers, seen = redis.call('MGET', unpack(KEYS)), several and {} end
for index = 1, count do repeat
  local key, state = KEYS[index], nil
  if mode == 'reset' then
    redis.call('DEL', key)
    return { 1, limit, limit, 0, 0 }
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
  if brief and state and calls == 1 and cost > 0 and #state == 44 and string.find(state, numbers, 27, true) then
    local time, previous, current, armed = struct.unpack('<I7I7I7I5', state)
    if time <= now and previous * period <= 2^53 and current * period <= 2^53 then
      if time < begun then previous, current = time >= begun - length and current or 0, 0 end
      local weighted, answer = previous * (period - (now - begun)), nil
      local remaining = limit - (weighted - weighted % period) / period - current - cost
      if remaining >= 0 then
        current = current + cost
        local reset_after = begun + 2 * period - (period - 1 - (period - 1) % current) / current - now
        local expires = armed * 1000000
        if expires >= now + reset_after and expires <= latest then
          redis.call('SETRANGE', key, '0', struct.pack('<I7I7I7', now, previous, current))
          answer = struct.pack('<ddddd', 1, limit, remaining, 0, reset_after)
        end
      elseif cost <= limit then
        -- The units that leave, the end of what they leave within, and how many of them may stay.
        local units, leaves, stay = previous, period, limit - current - cost
        if stay < 0 then units, leaves, stay = current, 2 * period, limit - cost end
        stay = (stay + 1) * period - 1
        local retry_after = begun + leaves - (stay - stay % units) / units - now
        units, leaves = current, 2 * period
        if current == 0 then units, leaves = previous, period end
        answer = struct.pack('<ddddd', 0, limit, remaining > -cost and remaining + cost or 0, retry_after,
          begun + leaves - (period - 1 - (period - 1) % units) / units - now)
      end
      if answer and count == 1 then return answer end
      if answer then
        answers[index] = answer
        break
      end
    end
  end

  local time, previous, current, armed = now, 0, 0, 0
  local window = begun
  local changed, rebased = false, false
  -- Only a key that is blocked, or whose denials are counted, has this tail.
  local noted, blocked_until, denied_since, denials = false, 0, 0, 0
  if state then
    local was_limit, was_period, was_tick = limit, period, tick
    if #state == 44 and string.find(state, numbers, 27, true) then
      time, previous, current, armed = struct.unpack('<I7I7I7I5', state)
    else
      local version
      if #state == 44 or #state == 62 then
        time, previous, current, armed, version, was_limit, was_period, was_tick =
          struct.unpack('<I7I7I7I5BI7I7I3', state)
        if #state == 62 then
          noted, blocked_until, denied_since, denials = true, struct.unpack('<I7I7I4', state, 45)
        end
      end
      if version ~= 4 or was_period < 1 or was_tick < 1 or was_limit * was_period > 2^53 or blocked_until > 2^53 then
        time = math.huge
      else
        changed = was_limit ~= limit or was_period * was_tick ~= length or was_tick ~= tick
      end
    end
    if time > 2^53 or previous * was_period > 2^53 or current * was_period > 2^53 then
      if count == 1 then
        return redis.error_reply('BADSTATE sliding_window_counter: the key holds something else than this limit\'s '
          .. 'state')
      end
      answers[index] = struct.pack('<ddddd', -2, limit, 0, 0, 0)
      break
    end

    if mode == 'refund' and blocked_until <= now_us then
      -- A state in which nothing was used is like none: counts that weigh nothing aren't there to be given back.
      local weighted = previous * (was_period - time % (was_period * was_tick) / was_tick)
      if (weighted - weighted % was_period) / was_period + current == 0 then previous = 0 end
    end
    if time > now or changed then
      local was_length = was_period * was_tick
      local ahead = (changed and time - time % tick or time) - now
      local weighted = previous * (was_period - time % was_length / was_tick)
      local used = (weighted - weighted % was_period) / was_period + current
      local fits = was_length == length and used <= limit and previous <= limit
      if changed and (as_is or afresh) then
        used = (afresh or used == 0) and 0 or limit - math.min(math.max(was_limit - used, 0), limit)
        fits = false
      end
      -- Another clock or other numbers: what was used at the state's own time stays used. Where the two counts can't
      -- say so under the new numbers, it is placed in one window.
      if ahead > 0 and used == 0 and blocked_until <= now_us then
        time, previous, current = now, 0, 0
      elseif ahead > longest then
        blocked_until = blocked_until - ahead
        time, previous, current, rebased = now, 0, math.min(used, limit), true
      elseif changed and not fits then
        previous, current = 0, math.min(used, limit)
      end
      time = time - time % tick
      changed = changed or rebased
    end

    if time <= now then
      if time < window then previous, current = time >= window - length and current or 0, 0 end
      time = now
    else
      window = time - time % length
    end
  end

  -- From here on `time` is the tick that the decision is made at: now, or the state's own while now lies before it.
  local old = 0
  if previous > 0 then
    local weighted = previous * (period - (time - window) / tick)
    old = (weighted - weighted % period) / period
  end
  local used = old + current
  local remaining = used < limit and limit - used or 0
  local wanted = cost
  if mode == 'at-most' then wanted = math.min(cost, math.max(remaining, 1)) end

  -- How many of the calls are allowed, and what they take.
  local allowed, retry_after, reset_after = calls, 0, 0
  if wanted * calls > remaining then allowed = (remaining - remaining % wanted) / wanted end
  local change = allowed * wanted

  local writes, blocked, counted, blocks, tail = true, false, false, false, ''
  if noted or not plain then
    if mode == 'block' then blocked_until = cost > 0 and now_us + cost or 0 end
    blocked = blocked_until > now_us
    writes = mode ~= 'peek' and mode ~= 'inspect'
    if mode == 'refund' then
      allowed, change = 1, -math.min(cost, previous + current)
    elseif mode == 'penalty' then
      local most = 2^53 / period
      allowed, change = 1, math.min(cost, math.max(0, most - most % 1 - 1 - current))
    elseif mode == 'block' then
      allowed, change = 1, 0
    elseif blocked then
      allowed, change = 0, 0
    elseif not writes then
      change = 0
    end

    -- A denial blocks the key, but for one that no wait would end.
    if block_for and allowed == 0 and writes and not blocked and wanted <= limit then
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

  if change ~= 0 then
    current = current + change
    if current < 0 then
      -- The newest units are given back first.
      previous, current = previous + current, 0
      local weighted = previous * (period - (time - window) / tick)
      old = (weighted - weighted % period) / period
    end
    used = old + current
    remaining = used < limit and limit - used or 0
  end
  if allowed < calls and wanted > remaining then
    if wanted > limit then
      retry_after = -1
    else
      local room = limit - current - wanted
      if room >= 0 then
        local until_it = (room + 1) * period - 1
        retry_after = period - (until_it - until_it % previous) / previous
      else
        local until_it = (limit - wanted + 1) * period - 1
        retry_after = 2 * period - (until_it - until_it % current) / current
      end
      retry_after = window + retry_after * tick - now_us
    end
  end
  if current > 0 then
    reset_after = window + (2 * period - (period - 1 - (period - 1) % current) / current) * tick - now_us
  elseif used > 0 then
    reset_after = window + (period - (period - 1 - (period - 1) % previous) / previous) * tick - now_us
  end
  if blocked then
    remaining, reset_after = 0, math.max(reset_after, blocked_until - now_us)
    if allowed == 0 and retry_after >= 0 then retry_after = math.max(retry_after, blocked_until - now_us) end
  end

  local settles = change ~= 0 or mode == 'block' or blocks
  if settles or changed or counted then
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
        redis.call('SETRANGE', key, '0', struct.pack('<I7I7I7', time, previous, current))
      else
        local expiry, at = 'PXAT', 0
        if server_time then
          armed = (last + 1000000 - last % 1000000) / 1000000
          at = armed * 1000
        else
          -- The decision's time is not the server's: an hour at least, and the next call in server time arms it anew.
          armed, expiry, at = 0, 'PX', math.max(3600000, (keep + -keep % 1000) / 1000)
        end
        redis.call('SET', key, struct.pack('<I7I7I7I5', time, previous, current, armed) .. numbers .. tail, expiry,
          string.format('%d', at))
      end
    else
      if counted and not server_time then
        -- As written, and kept for as long as anything that is decided at this time.
        redis.call('SET', key, string.sub(state, 1, 21) .. '\0\0\0\0\0' .. string.sub(state, 27, 44) .. tail, 'PX',
          string.format('%d', math.max(3600000, (keep + -keep % 1000) / 1000)))
      elseif counted then
        redis.call('SETRANGE', key, '44', tail)
      end
      if (changed or counted) and not covered and server_time and writes then
        -- Denied, and the key would expire before it resets under the new numbers, or before its denials are forgotten.
        armed = (last + 1000000 - last % 1000000) / 1000000
        -- In this order, since Redis refuses a SETRANGE, but no PEXPIREAT, where it is out of memory.
        redis.call('SETRANGE', key, '21', struct.pack('<I5', armed))
        redis.call('PEXPIREAT', key, string.format('%d', armed * 1000))
      end
    end
  end

  if packed then
    local answer = struct.pack('<ddddd', blocked and -1 or allowed, limit, remaining, retry_after, reset_after)
    if count == 1 then return answer end
    answers[index] = answer
    break
  end
  local answer = { allowed, limit, remaining, retry_after, reset_after }
  if mode == 'at-most' then
    answer[6] = change
  elseif mode == 'inspect' then
    local ttl_ms, written = redis.call('PTTL', key), { now, 0, 0, 0, 0, limit, period, tick }
    if state then written = { struct.unpack('<I7I7I7I5BI7I7I3', state) } end
    for at, field in ipairs({ ttl_ms, written[1], written[2], written[3], written[6], written[7], written[8] }) do
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
