-- The frame: what the algorithms' scripts have in common, which is all but their arithmetic. The script NAME is the text
-- of lua/NAME.lua and then this one.
--
-- KEYS
--   KEYS[1]  the limit's state; packed, up to 7999 keys, as many as Lua unpacks, each for itself
--
-- ARGV
--   the algorithm's own arguments, which its file lists, and then
--   cost    units  0 ..  0 takes nothing; of a block, its length in us, up to 2^51, 0 to lift it
--   mode    -      acquire | peek | at-most | refund | penalty | block | reset | inspect, reserve where its file says so
--                  and options: +as-is or +reset, +overage, +block=us with 1 .. 2^51 us
--   now_us  us     0 .. 2^52, or -1 for the server's time
--   packed, to acquire for each of the keys by itself, with less work for the server:
--   [1] numbers  by struct's format in the algorithm's file: its layout, its own arguments, the cost
--   [2] now_us   us     the server's time unless given
--   [3] several  for each key, where they differ or a key stands twice, struct's I7I3: the cost, and how many calls
--                of it, of which as many are allowed as fit one after the other; without it no key may stand twice: more
--                than the limit would be admitted
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
--   [7] ...             the state, as the algorithm's file lists it
--   then, as of a blocked key, also where this call blocked it, and with +overage:
--   blocked_us          us     until the block ends, 0 if not blocked
--   overage             denied calls in the time of a longest reset from the first of them
--   packed, one string; for each key struct's i7i7: remaining and reset_after_us, if all of its calls are allowed, else
--   i7i7i7i7: -1 - remaining, reset_after_us, retry_after_us of the first call that isn't allowed, and how many are
--   allowed (-1: blocked; -2, among several keys: it holds something else than this limit's state)
--
-- Modes
--   acquire    : takes the cost if it is there
--   reserve    : takes it also where it isn't there yet, up to max_debt; retry_after is the wait until it is
--   at-most    : as acquire, for min(cost, remaining) units, or for one where none remains
--   refund     : gives the cost back, up to what is used; penalty: takes it, whether it is there or not, as far as
--                numbers stay exact
--   block      : denies every call until it ends; a refund or a penalty changes the state beneath it. +block: a denial
--                starts one, unless the key is blocked already or the cost could never be allowed
--   +as-is and +reset: where the state's numbers are others than the call's, what was left stays, or nothing was used;
--                else what was used stays used
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

-- `a` to `e` are the algorithm's own arguments, as its file lists them; the first is the limit. A packed call acquires.
local packed, given = #ARGV < 5, #KEYS
local several, cost, mode, at_us, layout = nil, nil, 'acquire', -1, nil
local as_is, afresh, overage, block_for = false, false, false, false
local read, longest, a, b, c, d, e
if packed and LENGTH and given > 0 and ARGV[1] and #ARGV[1] == LENGTH then
  -- The cost is the last of them.
  layout, a, b, c, d, e, cost = struct.unpack(NUMBERS, ARGV[1])
  if COUNT < 5 then cost = COUNT == 4 and e or COUNT == 3 and d or c end
  several = ARGV[3]
  if ARGV[2] then at_us = tonumber(ARGV[2]) end
  read = at_us
  if layout == LAYOUT and given <= 7999 and (not several or #several == 10 * given) then longest = check(a, b, c, d, e) end
elseif not packed then
  -- An argument that is missing or no number fails in here, without a check of each.
  read, a, b, c, d, e = pcall(function(a, b, c, d, e)
    return a + 0, b + 0, c and c + 0, d and d + 0, e and e + 0
  end, unpack(ARGV, 1, COUNT))
  local at = decide and COUNT + 1 or COUNT
  cost, mode, at_us = tonumber(ARGV[at + 1] or ''), ARGV[at + 2], tonumber(ARGV[at + 3] or '')
  read = read and given > 0 and cost and mode and at_us
end
if not read then
  local expected, fault, at = ARGUMENTS .. ', cost, mode, now_us', nil, 0
  for name in string.gmatch(expected, '[%a_]+') do
    at = at + 1
    if not fault and not ARGV[at] then fault = 'missing ' .. name end
    if not fault and name ~= 'mode' and name ~= 'holder' and not tonumber(ARGV[at]) then fault = name .. ' is no number' end
  end
  if packed and LENGTH and ARGV[1] and not tonumber(ARGV[1]) then
    expected = 'numbers, now_us, several'
    fault = cost and 'now_us is no number' or 'numbers are not ' .. LENGTH .. ' bytes'
  end
  if given == 0 then fault = 'missing KEYS[1]' end
  return redis.error_reply('BADARG ' .. NAME .. ': expected ' .. expected .. '; ' .. fault)
end

-- A mode may carry options: how the rule treats changed numbers, that its denials are counted, and that they block.
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
if decide then return decide(KEYS[1], a, b, ARGV[3], cost, mode, at_us, overage, block_for) end
if not packed and a % 1 + b % 1 + (c or 0) % 1 + (d or 0) % 1 + (e or 0) % 1 == 0 and cost >= 0 and cost % 1 == 0
  and (mode == 'acquire' or mode == 'peek' or mode == 'at-most' or mode == 'refund' or mode == 'penalty' or mode == 'reset'
    or mode == 'inspect' or (mode == 'reserve' and RESERVES) or (mode == 'block' and cost <= 2^51)) then
  longest = check(a, b, c, d, e)
end
if not (longest and longest <= 2^51 and (at_us == -1 or at_us >= 0 and at_us <= 2^52 and at_us % 1 == 0)) then
  return redis.error_reply('BADARG ' .. NAME .. ': expected whole numbers in the ranges of its header and a mode, got '
    .. string.gsub(table.concat(ARGV, ' '), '[^ -~]', '?'))
end
local limit = a
if mode == 'reset' then
  redis.call('DEL', KEYS[1])
  return { 1, limit, limit, 0, 0 }
end

local server_time, now_us = at_us == -1, at_us
if server_time then
  local clock = redis.call('TIME')
  now_us = clock[1] * 1000000 + clock[2]
end
local plain = mode == 'acquire' and not overage and not block_for
local keys, state, states, answers = packed and given or 1, nil, nil, {}
if short and keys == 1 then
  state = redis.call('GET', KEYS[1])
elseif short then
  states = redis.call('MGET', unpack(KEYS))
  if several then
    -- What was read of a key that stands twice doesn't hold after the first of its calls.
    local seen = {}
    for index, key in ipairs(KEYS) do
      if seen[key] then states[index] = false end
      seen[key] = true
    end
  end
end
if short and plain and server_time then
  short(KEYS, state, states, answers, several, now_us, cost, longest, a, b, c, d, e)
  local answer = answers[1]
  if keys > 1 then
    local missed = false
    for index = 1, keys do missed = missed or not answers[index] end
    if not missed then return table.concat(answers) end
  elseif answer and packed then
    return answer
  elseif answer then
    local remaining, reset_after, at = struct.unpack('<i7i7', answer)
    if remaining >= 0 then return { 1, limit, remaining, 0, reset_after } end
    return { 0, limit, -1 - remaining, struct.unpack('<i7', answer, at), reset_after }
  end
end

-- a * b / c, rounded up. The product may not fit, so it is divided bit by bit.
local function scaled(a, b, c)
  if b == c then return a end
  local quotient, remainder = 0, 0
  for exponent = 52, 0, -1 do
    quotient = quotient * 2
    if remainder >= c - remainder then
      quotient, remainder = quotient + 1, remainder - (c - remainder)
    else
      remainder = remainder * 2
    end
    if b >= 2 ^ exponent then
      b = b - 2 ^ exponent
      if remainder >= c - a then
        quotient, remainder = quotient + 1, remainder - (c - a)
      else
        remainder = remainder + a
      end
    end
  end
  return remainder > 0 and quotient + 1 or quotient
end

local load, wait, move, write, inspect, read, save = algorithm(scaled, longest, a, b, c, d, e)
-- Since when denials are counted, and until when these are.
local counted_since, counted_until = now_us - longest + 1, nil
local stale
if window then
  stale = string.format('STALE %s: expected two windows around now, got others; now_us=%.0f', NAME, now_us)
  counted_since, counted_until = window(now_us, b, c, d)
  if not counted_since then return redis.error_reply(stale) end
end
local debt, calls = mode == 'reserve' and e or 0, 1
local most, writes = limit + debt, mode ~= 'peek' and mode ~= 'inspect'
local fault
for index = 1, keys do if not answers[index] then repeat
  -- What is left before it is answered is unreadable.
  fault = 'BADSTATE ' .. NAME .. ': the key holds something else than this limit\'s state'
  answers[index] = struct.pack('<i7i7i7i7', -1, 0, 0, -2)
  local key, state = KEYS[index], state
  if states then state = states[index] end
  if several then cost, calls = struct.unpack('<I7I3', several, index * 10 - 9) end
  -- Only a key that is blocked, or whose denials are counted, has a tail.
  local noted, blocked_until, denied_since, denials = false, 0, 0, 0
  if read then
    state, noted, blocked_until, denied_since, denials = read(key, keys > 1)
  elseif keys > 1 and (several or not state) then
    -- MGET has nothing of a key of another type, nor what this call has written since.
    state = redis.pcall('GET', key)
  end
  if type(state) == 'table' then
    -- Anything else that is refused, such as by a missing permission, ends the call.
    if string.find(state.err, '^WRONGTYPE') then break end
    return redis.error_reply(state.err .. (read and ' command: getrange' or ' command: get'))
  end
  if state and not read and #state == STATE + 18 then
    noted, blocked_until, denied_since, denials = true, struct.unpack('<I7I7I4', state, STATE + 1)
  end
  if state == nil or (state and not read and #state ~= STATE and not noted) or blocked_until > 2^53 then break end
  -- For when the key's expiry is armed, whether its numbers have changed, and how far ahead of now its time was.
  local armed, changed, ahead, remaining, reset_after = load(state, now_us, blocked_until > now_us, as_is, afresh, mode)
  if not armed then
    -- The windows that the call names don't tell what this state is of.
    if changed == 'STALE' then
      fault, answers[index] = stale, struct.pack('<i7i7i7i7', -1, 0, now_us, -3)
    end
    break
  end
  blocked_until = blocked_until - ahead

  local wanted = mode == 'at-most' and math.min(cost, math.max(remaining, 1)) or cost
  -- How many of the calls are allowed.
  local allowed, retry_after = calls, 0
  if wanted * calls > remaining then
    if debt > 0 and wanted <= most and wait(wanted, debt) == 0 then
      retry_after = wait(wanted, 0)
    else
      allowed = (remaining - remaining % wanted) / wanted
    end
  end
  local takes = writes
  local blocked, counted, blocks, tail = false, false, false, ''
  if noted or not plain then
    if mode == 'block' then blocked_until = cost > 0 and now_us + cost or 0 end
    blocked = blocked_until > now_us
    if mode == 'refund' or mode == 'penalty' or mode == 'block' then
      allowed, retry_after, takes = 1, 0, mode ~= 'block'
    elseif blocked then
      allowed, retry_after = 0, 0
    end
    -- A denial blocks the key, but for one that no wait would end.
    if block_for and allowed == 0 and writes and not blocked and wanted <= most then
      blocked_until, blocked, blocks = now_us + block_for, true, true
    end
    if denials > 0 and (now_us < denied_since or denied_since < counted_since) then denials = 0 end
    counted = overage and allowed == 0 and writes
    if counted then
      if denials == 0 then denied_since = now_us end
      denials = math.min(denials + 1, 2^32 - 1)
    end
    if blocked or denials > 0 then
      tail = struct.pack('<I7I7I4', blocked and blocked_until or 0, denied_since, denials)
    end
  end

  local moved = false
  if takes and allowed * wanted > 0 then moved, remaining, reset_after = move(allowed * wanted, mode) end
  if allowed < calls and wanted > 0 then retry_after = wanted > most and -1 or wait(wanted, debt) end
  if not (remaining and retry_after) then break end
  if blocked then
    remaining, reset_after = 0, math.max(reset_after, blocked_until - now_us)
    if allowed == 0 and retry_after >= 0 then retry_after = math.max(retry_after, blocked_until - now_us) end
  end

  local settles, rebased = moved or mode == 'block' or blocks, ahead > 0
  local front, numbers, kept_until
  if writes and (settles or changed or rebased or counted) then
    if write then front, numbers, kept_until = write() end
    -- Whether the key's expiry lies between what it has to outlive, this reset and the time of counted denials, and the
    -- longest that it may be armed for.
    local least, last = now_us + reset_after, math.max(kept_until or now_us + 2 * longest, now_us + reset_after)
    if denials > 0 then least = math.max(least, counted_until or denied_since + longest) end
    local covered, keep = server_time and armed * 1000000 >= least, last - now_us
    -- At a time that isn't the server's for an hour at least, and the next call in server time arms it anew.
    local again, expiry, at = (last + 1000000 - last % 1000000) / 1000000, 'PXAT', nil
    if not server_time then again, expiry, at = 0, 'PX', math.max(3600000, (keep + -keep % 1000) / 1000) end
    at = string.format('%d', at or again * 1000)
    if save then
      if not save(settles or rebased, counted, covered, again, last, expiry, at, tail, server_time) then break end
    elseif settles and tail == '' and reset_after == 0 then
      redis.call('DEL', key)
    elseif settles or rebased or (counted and not state) then
      if covered and not (changed or rebased or noted or tail ~= '') and armed * 1000000 <= last + 1000000 then
        redis.call('SETRANGE', key, '0', front)
      else
        redis.call('SET', key, front .. struct.pack('<I5', again) .. numbers .. tail, expiry, at)
      end
    elseif counted and not server_time then
      -- As written, and kept for as long as anything that is decided at this time.
      redis.call('SET', key, string.sub(state, 1, #front) .. '\0\0\0\0\0' .. string.sub(state, #front + 6, STATE) .. tail,
        expiry, at)
    else
      if counted then redis.call('SETRANGE', key, string.format('%d', STATE), tail) end
      if (changed or counted) and not covered and server_time then
        -- Denied, and the key would expire before it resets under the new numbers, or before its denials are forgotten.
        -- In this order, since Redis refuses a SETRANGE, but no PEXPIREAT, where it is out of memory.
        redis.call('SETRANGE', key, string.format('%d', #front), struct.pack('<I5', again))
        redis.call('PEXPIREAT', key, at)
      end
    end
  end

  fault = nil
  if packed and allowed == calls and not blocked then
    answers[index] = struct.pack('<i7i7', remaining, reset_after)
  elseif packed then
    answers[index] = struct.pack('<i7i7i7i7', -1 - remaining, reset_after, retry_after, blocked and -1 or allowed)
  else
    local answer = { allowed, limit, remaining, retry_after, reset_after }
    if mode == 'at-most' then
      answer[6] = allowed * wanted
    elseif mode == 'inspect' then
      if write and not state then
        front, numbers = write()
        state = front .. struct.pack('<I5', 0) .. numbers
      end
      answer[6] = redis.call('PTTL', key)
      for at, field in ipairs(inspect(state)) do answer[6 + at] = field end
    end
    if blocked or overage or mode == 'inspect' then
      answer[#answer + 1] = blocked and blocked_until - now_us or 0
      answer[#answer + 1] = denials
    end
    return answer
  end
until true end end
if packed and (keys > 1 or not fault) then return table.concat(answers) end
return redis.error_reply(fault)
