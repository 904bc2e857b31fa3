-- calendar_window: admits `limit` units in each window of the calendar, such as a month; nothing carries over.
--
-- KEYS
--   KEYS[1]  the limit's state; packed, up to 7999 keys, as many as Lua unpacks
--
-- ARGV
--   ARGV[1] limit   units  1 .. 2^53  in each window
--   ARGV[2] first   us     -2^53 ..   where a window starts: us since the epoch, negative before 1970
--   ARGV[3] second  us     above first: where it ends, and the next one starts
--   ARGV[4] stop    us     above second, .. 2^53: where that one ends
--   ARGV[5] cost    units  0 ..       0 takes nothing; of a block, its length in us, up to 2^51, 0 to lift it
--   ARGV[6] mode    -      acquire | peek | at-most | refund | penalty | block | reset | inspect
--                          and its options: +as-is or +reset, +overage, +block=us with 1 .. 2^51 us
--   ARGV[7] now_us  us     0 .. 2^52, or -1 for the server's time
--   The script knows no calendar: the caller tells it two neighbouring windows, and it takes the one that now is in.
--   packed, to acquire for each of the keys by itself, with less work for the server:
--   [1] numbers  struct's BI7i7i7i7I7: the layout (8), limit, first, second, stop, cost
--   [2] now_us   us     the server's time unless given
--   [3] several  for each key, where they differ or a key stands twice, struct's I7I3: the cost, and how many calls
--                of it; without it no key may stand twice: more than the limit would be admitted
--
-- Reply
--   [1] allowed         0 | 1
--   [2] limit           units
--   [3] remaining       units  can be taken right now, after this decision
--   [4] retry_after_us  us     0: now, -1: never
--   [5] reset_after_us  us     until the key is as if never used
--   at-most appends:
--   [6] granted         units  taken, of the cost at most
--   inspect appends:
--   [6] ttl_ms          ms     PTTL: -2 without a key
--   [7] time_us         us     when the state was written
--   [8] window_us       us     the start of its window
--   [9] used            units  in its window
--   [10] state_limit    units  the limit it was written under
--   [11] blocked_us     us     until the block ends, 0 if not blocked
--   [12] overage        denied calls since the first of them in the window that now is in
--   a blocked key, also where this call blocked it, and +overage append last:
--   blocked_us, overage
--   packed, one string with struct's ddddd for each key: how many of its calls are allowed (-1: blocked; -2, among
--   several keys: it holds something else than this limit's state; -3, among several keys: as STALE, and the fourth
--   number is now_us), limit, remaining, retry_after_us (of the first call that isn't allowed), reset_after_us
--   Where now is in neither window, the error STALE, which ends with now_us=<us>: nothing was charged or written, and
--   the call can be made again with the windows around that time. So is it where now is in the second one and the
--   state's time beyond it: the windows around now show whether that is too far ahead.
--
-- Formula
--   remaining  : limit - used, 0 at least, where used is what was taken since the window's start
--   allowed    : cost <= remaining
--   retry_after, reset_after: to the window's end
--   at-most    : as allowed, for min(cost, remaining) units, or for one where none remains
--   refund     : used - cost, 0 at least, of the window that now is in; penalty: used + cost, 2^53 at most: beyond the
--                limit until the window ends, since nothing carries over
--   block      : denies every call until it ends; a refund or a penalty moves what is used beneath it. +block: a denial
--                starts one, unless the key is blocked already or the cost could never be allowed
--   changed numbers, and other windows, keep what was used in the window that the state's time is in: at most limit.
--                +as-is: what was left; +reset: nothing. Where the state's time is in neither window it can't be
--                seen whether they have changed, and it counts as if not; nor can it where windows start alike
--   a state's time ahead of now counts as now, at most the longer of the two windows ahead and before stop; else the
--                state is brought back to now
--   calls of a key: as many as fit one after the other
--
-- Source
--   The counter per window of Redis's INCR documentation.
--
-- Commands
--   TIME, GET, MGET; what takes or gives: SET, SETRANGE, PEXPIREAT; reset, and a refund of all: DEL; inspect: PTTL
--
-- Expiry
--   SET arms it for the window's end and, since a clock may step back across that, an hour more, or as long as the
--   window if that is less, or for a block's end, and up to a second. SETRANGE keeps it within the window.
--
-- A deny writes
--   nothing, but for four cases: the state's time lay too far ahead and is brought back to now; other windows of
--   the calendar end later, and its expiry alone is extended; +overage counts it, and the expiry is extended where it
--   would end before the count does; or +block blocks the key, which is then written as a block writes it, unless it is
--   blocked already or the cost could never be allowed.

-- Packed, ARGV begins with the numbers as a state ends with them, and what is asked is to acquire.
local packed = #ARGV < 5
local given = #KEYS
local read, numbers, layout, limit, first, second, stop, cost, mode, now_us, several
if packed then
  numbers, mode, now_us, several = ARGV[1], 'acquire', -1, ARGV[3]
  if ARGV[2] then now_us = tonumber(ARGV[2]) end
  if numbers and #numbers == 36 then
    layout, limit, first, second, stop, cost = struct.unpack('<BI7i7i7i7I7', numbers)
    read = now_us
  end
else
  -- An argument that is missing or no number fails here, without a check of each.
  read, limit, first, second, stop, cost, mode, now_us = pcall(function(ARGV)
    return ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0, ARGV[5] + 0, ARGV[6], ARGV[7] + 0
  end, ARGV)
end

if not read or given == 0 then
  local expected, fault, at = 'limit, first, second, stop, cost, mode, now_us', nil, 0
  for name in string.gmatch(expected, '[%a_]+') do
    at = at + 1
    if not fault and not ARGV[at] then fault = 'missing ' .. name end
    if not fault and name ~= 'mode' and not tonumber(ARGV[at]) then fault = name .. ' is no number' end
  end
  if packed and ARGV[1] and not tonumber(ARGV[1]) then
    expected, fault = 'numbers, now_us, several', layout and 'now_us is no number' or 'numbers are not 36 bytes'
  end
  if given == 0 then fault = 'missing KEYS[1]' end
  return redis.error_reply('BADARG calendar_window: expected ' .. expected .. '; ' .. fault)
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
local good = limit >= 1 and limit <= 2^53 and first >= -2^53 and first < second and second < stop and stop <= 2^53
  and (server_time or now_us >= 0 and now_us <= 2^52 and now_us % 1 == 0)
if packed then
  good = good and layout == 8 and given <= 7999 and (not several or #several == 10 * given)
else
  good = good and cost >= 0 and cost % 1 == 0 and limit % 1 + first % 1 + second % 1 + stop % 1 == 0
    and (mode == 'acquire' or mode == 'peek' or mode == 'at-most' or mode == 'refund' or mode == 'penalty'
      or mode == 'reset' or mode == 'inspect' or (mode == 'block' and cost <= 2^51))
end
if not good then
  return redis.error_reply('BADARG calendar_window: expected whole numbers in the ranges of its header and a mode, got '
    .. string.gsub(table.concat(ARGV, ' '), '[^ -~]', '?'))
end

if server_time then
  local clock = redis.call('TIME')
  now_us = clock[1] * 1000000 + clock[2]
end
local stale = 'STALE calendar_window: expected two windows around now, got others; now_us=%.0f'
if (now_us < first or now_us >= stop) and mode ~= 'reset' then
  return redis.error_reply(string.format(stale, now_us))
end
-- The window that now is in, and what a state of it ends with.
local start, ends = first, second
if now_us >= second then start, ends = second, stop end
if not packed then
  numbers = struct.pack('<BI7i7', 8, limit, start)
elseif start == first then
  numbers = string.sub(numbers, 1, 15)
else
  numbers = string.sub(numbers, 1, 8) .. string.sub(numbers, 16, 22)
end
local plain = mode == 'acquire' and not overage and not block_for
local brief, latest = packed and server_time, ends + math.min(ends - start, 3600000000) + 1000000

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

  -- Most calls meet a state of this window under this limit and write in place, or nothing: what is said below, in
  -- fewer steps.
  if brief and state and calls == 1 and cost > 0 and #state == 34 and string.find(state, numbers, 20, true) then
    local time, used, armed = struct.unpack('<I7I7I5', state)
    local expires = armed * 1000000
    -- Windows that start alike may end apart: a day's state is not kept until the week's end.
    if time <= now_us and time >= start and used <= limit and expires >= ends then
      local answer
      if cost <= limit - used then
        if expires <= latest then
          used = used + cost
          redis.call('SETRANGE', key, '0', struct.pack('<I7I7', now_us, used))
          answer = struct.pack('<ddddd', 1, limit, limit - used, 0, ends - now_us)
        end
      elseif cost <= limit then
        answer = struct.pack('<ddddd', 0, limit, limit - used, ends - now_us, ends - now_us)
      end
      if answer and count == 1 then return answer end
      if answer then
        answers[index] = answer
        break
      end
    end
  end

  local time, window, ending, used, armed = now_us, start, ends, 0, 0
  -- Whether the state ends with this limit and this window.
  local same, rebased = false, false
  -- Only a key that is blocked, or whose denials are counted, has this tail.
  local noted, blocked_until, denied_since, denials = false, 0, 0, 0
  if state then
    local version, was_limit, was_window
    if #state == 34 or #state == 52 then
      time, used, armed, version, was_limit, was_window = struct.unpack('<I7I7I5BI7i7', state)
      if #state == 52 then
        noted, blocked_until, denied_since, denials = true, struct.unpack('<I7I7I4', state, 35)
      end
    end
    if version ~= 8 or time > 2^53 or was_window > time or was_window < -2^53 or was_limit > 2^53 or used > 2^53
      or blocked_until > 2^53 then
      if count == 1 then
        return redis.error_reply('BADSTATE calendar_window: the key holds something else than this limit\'s state')
      end
      answers[index] = struct.pack('<ddddd', -2, limit, 0, 0, 0)
      break
    end

    local ahead = time - now_us
    if time < start then
      time, used = now_us, 0
    else
      if time >= second and time < stop then window, ending = second, stop end
      same = was_limit == limit and (was_window == window or time >= stop)
      if not same then
        -- Changed numbers, or another calendar: what was used in the window of the state's own time stays used.
        if as_is and used > 0 then used = limit - math.min(limit, was_limit - used) end
        used = afresh and 0 or math.min(limit, used)
      end
      if ahead <= 0 then
        time = now_us
      elseif used == 0 and blocked_until <= now_us then
        time, window, ending, same = now_us, start, ends, false
      elseif time >= stop and start == second then
        if count == 1 then return redis.error_reply(string.format(stale, now_us)) end
        answers[index] = struct.pack('<ddddd', -3, limit, 0, now_us, 0)
        break
      elseif time >= stop or ahead > math.max(second - first, stop - second) then
        blocked_until = blocked_until - ahead
        time, window, ending, same, rebased = now_us, start, ends, false, true
        used = math.min(limit, used)
      end
    end
  end

  -- From here on `time` is the moment that the decision is made at: now, or the state's own while now lies before it.
  local remaining, wanted = math.max(limit - used, 0), cost
  if mode == 'at-most' then wanted = math.min(cost, math.max(remaining, 1)) end

  -- How many of the calls are allowed, and what they take.
  local allowed, retry_after, reset_after = calls, 0, 0
  if wanted * calls > remaining then allowed = (remaining - remaining % wanted) / wanted end
  local taken = allowed * wanted

  local writes, blocked, counted, blocks, tail = true, false, false, false, ''
  if noted or not plain then
    if mode == 'block' then blocked_until = cost > 0 and now_us + cost or 0 end
    blocked = blocked_until > now_us
    writes = mode ~= 'peek' and mode ~= 'inspect'
    if mode == 'refund' then
      allowed, taken = 1, -math.min(cost, used)
    elseif mode == 'penalty' then
      allowed, taken = 1, math.min(cost, 2^53 - used)
    elseif mode == 'block' then
      allowed, taken = 1, 0
    elseif blocked then
      allowed, taken, retry_after = 0, 0, 0
    elseif not writes then
      taken = 0
    end

    -- A denial blocks the key, but for one that no wait would end.
    if block_for and allowed == 0 and writes and not blocked and wanted <= limit then
      blocked_until, blocked, blocks = now_us + block_for, true, true
    end
    if denials > 0 and (now_us < denied_since or denied_since < start) then denials = 0 end
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
    used = used + taken
    remaining = math.max(limit - used, 0)
  end
  if allowed < calls and wanted > 0 then
    if wanted > limit then
      retry_after = -1
    elseif wanted > remaining then
      retry_after = ending - now_us
    end
  end
  if used > 0 then reset_after = ending - now_us end
  if blocked then
    remaining, reset_after = 0, math.max(reset_after, blocked_until - now_us)
    if allowed == 0 and retry_after >= 0 then retry_after = math.max(retry_after, blocked_until - now_us) end
  end

  local settles = taken ~= 0 or mode == 'block' or blocks
  -- Whether the key's expiry lies between what it has to outlive, this reset and the window of counted denials, and what
  -- it is armed for.
  local least, last = now_us + reset_after, ending + math.min(ending - window, 3600000000)
  if denials > 0 and ends > least then least = ends end
  local covered = server_time and armed * 1000000 >= least
  local extends = server_time and writes and not covered and least > now_us
  if settles or rebased or counted or extends then
    if blocked and blocked_until > last then last = blocked_until end
    if settles and used == 0 and tail == '' then
      redis.call('DEL', key)
    elseif settles or (rebased and writes) or (counted and not state) then
      if covered and same and not (noted or tail ~= '') and armed * 1000000 <= last + 1000000 then
        redis.call('SETRANGE', key, '0', struct.pack('<I7I7', time, used))
      else
        local expiry, at = 'PXAT', 0
        if server_time then
          armed = (last + 1000000 - last % 1000000) / 1000000
          at = armed * 1000
        else
          -- The decision's time is not the server's: an hour at least, and the next call in server time arms it anew.
          local keep = last - now_us
          armed, expiry, at = 0, 'PX', math.max(3600000, (keep + -keep % 1000) / 1000)
        end
        redis.call('SET', key, struct.pack('<I7I7I5BI7i7', time, used, armed, 8, limit, window) .. tail, expiry,
          string.format('%d', at))
      end
    else
      if counted and not server_time then
        -- As written, and kept for as long as anything that is decided at this time.
        local keep = last - now_us
        redis.call('SET', key, string.sub(state, 1, 14) .. '\0\0\0\0\0' .. string.sub(state, 20, 34) .. tail, 'PX',
          string.format('%d', math.max(3600000, (keep + -keep % 1000) / 1000)))
      elseif counted then
        redis.call('SETRANGE', key, '34', tail)
      end
      if extends then
        -- Denied, and the key would expire before it resets in other windows, or before its denials are forgotten.
        armed = (last + 1000000 - last % 1000000) / 1000000
        -- In this order, since Redis refuses a SETRANGE, but no PEXPIREAT, where it is out of memory.
        redis.call('SETRANGE', key, '14', struct.pack('<I5', armed))
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
    answer[6] = taken
  elseif mode == 'inspect' then
    local ttl_ms, written = redis.call('PTTL', key), { now_us, 0, 0, 8, limit, start }
    if state then written = { struct.unpack('<I7I7I5BI7i7', state) } end
    for at, field in ipairs({ ttl_ms, written[1], written[6], written[2], written[5] }) do
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
