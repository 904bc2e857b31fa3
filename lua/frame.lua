-- The frame: the last part of every script, which uses the functions defined in its algorithm's file: modes and
-- options, the loop over keys, blocks and overage, expiry, the write, the reply.
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
--   then, if the key is blocked, even by this call, or with +overage:
--   blocked_us          us     until the block ends, 0 if not blocked
--   overage             denied calls within one longest reset of the first of them
--   packed, one string; for each key struct's i7i7: remaining and reset_after_us, if all of its calls are allowed, else
--   i7i7i7i7: -1 - remaining, reset_after_us, retry_after_us of the first call that isn't allowed, and how many are
--   allowed (-1: blocked; -2, among several keys: it holds something else than this limit's state)
--
-- Modes
--   acquire    : takes the cost if it is there
--   reserve    : also takes units that aren't available yet, up to max_debt; retry_after is the wait until they are
--   at-most    : as acquire, for min(cost, remaining) units, or for one if none remains
--   refund     : gives the cost back, up to what is used; penalty: takes it, whether it is there or not, as far as
--                numbers stay exact
--   block      : denies every call until it ends; a refund or a penalty changes the state beneath it. +block: a denial
--                starts one, unless the key is blocked already or the cost could never be allowed
--   numbers that differ from the state's: what was used stays used; with +as-is, what was left stays left; with
--                +reset, the key is as if never used
--
-- Commands
--   TIME, GET, MGET; what takes or gives: SET, SETRANGE, PEXPIREAT; reset, and what leaves
--   the key as if never used, such as a refund of all: DEL; inspect: PTTL
--
-- Expiry
--   SET sets it to twice the longest reset, or to this reset if a penalty or a block made it longer, plus up to a
--   second; SETRANGE keeps it while it covers this reset. A peek doesn't extend it after a change of numbers.
--
-- A deny writes
--   nothing, except in four cases: the state's time lay too far ahead and is brought back to now; the numbers have
--   changed so that the key would expire before it resets under the new ones, and its expiry alone is extended;
--   +overage counts it, and the expiry is extended where it would end before the count does; or +block blocks the key,
--   which is then written as a block writes it, unless it is blocked already or the cost could never be allowed.

if fast and not missed then return table.concat(answers) end

-- Missing, malformed and extra arguments are reported by name.
local fault, expected = nil, ARGUMENTS .. ', cost, mode, now_us'
if not valid or not mode or cost ~= cost or at_us ~= at_us or key_count == 0 then
  local at = 0
  for name in string.gmatch(expected, '[%a_]+') do
    at = at + 1
    if not fault and not ARGV[at] then fault = 'missing ' .. name end
    local is_number = name ~= 'mode' and name ~= 'holder'
    if not fault and is_number and not tonumber(ARGV[at]) then fault = name .. ' is no number' end
  end
  if not packed and not fault and ARGV[at + 1] then fault = 'more than these' end
  if packed and LENGTH and not tonumber(packed) then
    expected, fault = 'numbers, now_us, several', nil
    if at_us ~= at_us then fault = 'now_us is no number' end
    if #packed ~= LENGTH then fault = 'numbers are not ' .. LENGTH .. ' bytes' end
  end
  if key_count == 0 then fault = 'missing KEYS[1]' end
  if fault then return redis.error_reply('BADARG ' .. NAME .. ': expected ' .. expected .. '; ' .. fault) end
end

-- A mode may carry options: how changed numbers are treated, that denials are counted, and that they block.
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
if decide then return decide(mode, overage, block_for) end
local known = mode == 'acquire' or mode == 'peek' or mode == 'at-most' or mode == 'refund' or mode == 'penalty'
  or mode == 'reset' or mode == 'inspect' or (mode == 'reserve' and RESERVES) or (mode == 'block' and cost <= 2^51)
if not (valid and known and cost >= 0 and cost % 1 == 0 and key_count <= 7999
  and (not several or #several == 10 * key_count)
  and (at_us == -1 or at_us >= 0 and at_us <= 2^52 and at_us % 1 == 0)) then
  return redis.error_reply('BADARG ' .. NAME .. ': expected whole numbers in the ranges of its header and a mode, got '
    .. string.gsub(table.concat(ARGV, ' '), '[^ -~]', '?'))
end
local limit = a
if mode == 'reset' then
  redis.call('DEL', KEYS[1])
  return { 1, limit, limit, 0, 0 }
end

-- What the fast path hasn't read.
if not read and key_count > 1 and not states then
  states = redis.call('MGET', unpack(KEYS))
elseif not read and key_count == 1 and state == nil then
  state = redis.call('GET', KEYS[1])
end
answers = answers or {}
local server_time, plain = at_us == -1, mode == 'acquire' and not overage and not block_for

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

-- Since when denials are counted, and until when this count lasts.
local counted_since, counted_until = now_us - longest + 1, nil
local stale
if window_of then
  stale = string.format('STALE %s: expected two windows around now, got others; now_us=%.0f', NAME, now_us)
  counted_since, counted_until = window_of()
  if not counted_since then return redis.error_reply(stale) end
end
local debt, calls = mode == 'reserve' and e or 0, 1
local most, writes = limit + debt, mode ~= 'peek' and mode ~= 'inspect'
for index = 1, key_count do if not answers[index] then repeat
  -- The answer if the loop breaks early: the state is unreadable.
  fault = 'BADSTATE ' .. NAME .. ': the key holds something else than this limit\'s state'
  answers[index] = struct.pack('<i7i7i7i7', -1, 0, 0, -2)
  local key, state = KEYS[index], state
  if states then state = states[index] end
  if several then cost, calls = struct.unpack('<I7I3', several, index * 10 - 9) end
  -- Only a key that is blocked, or whose denials are counted, has a tail; and a log that a refund wrote last.
  local noted, blocked_until, denied_since, denials = false, 0, 0, 0
  if read then
    -- What the fast path has read, unless this call has written since.
    local known = not (repeated and repeated[index]) and state
    state, noted, blocked_until, denied_since, denials = read(key, key_count > 1, known)
  elseif key_count > 1 and (not state or repeated and repeated[index]) then
    -- MGET returns nothing for a key of another type, nor what this call has written since.
    state = redis.pcall('GET', key)
  end
  if type(state) == 'table' then
    -- Any other refusal, such as a missing permission, ends the call.
    if string.find(state.err, '^WRONGTYPE') then break end
    return redis.error_reply(state.err .. (read and ' command: getrange' or ' command: get'))
  end
  if state and not read and #state == STATE + 18 then
    noted, blocked_until, denied_since, denials = true, struct.unpack('<I7I7I4', state, STATE + 1)
  end
  if state == nil or (state and not read and #state ~= STATE and not noted) or blocked_until > 2^53 then break end
  -- When the key's expiry is armed for, whether its numbers have changed, and how far ahead of now its time was.
  local armed, changed, ahead, remaining, reset_after = load(state, blocked_until > now_us, as_is, afresh, scaled, mode)
  if not armed then
    -- The call's windows don't show which window this state belongs to.
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
  local may_move = writes
  local blocked, counted, blocks, tail = false, false, false, ''
  if noted or not plain then
    if mode == 'block' then blocked_until = cost > 0 and now_us + cost or 0 end
    blocked = blocked_until > now_us
    if mode == 'refund' or mode == 'penalty' or mode == 'block' then
      allowed, retry_after, may_move = 1, 0, mode ~= 'block'
    elseif blocked then
      allowed, retry_after = 0, 0
    end
    -- A denial blocks the key, unless the cost could never be allowed.
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
  if may_move and allowed * wanted > 0 then moved, remaining, reset_after = move(allowed * wanted, mode) end
  if allowed < calls and wanted > 0 then retry_after = wanted > most and -1 or wait(wanted, debt) end
  if not (remaining and retry_after) then break end
  if blocked then
    remaining, reset_after = 0, math.max(reset_after, blocked_until - now_us)
    if allowed == 0 and retry_after >= 0 then retry_after = math.max(retry_after, blocked_until - now_us) end
  end

  local alters, rebased = moved or mode == 'block' or blocks, ahead > 0
  local front, numbers, kept_until
  if writes and (alters or changed or rebased or counted) then
    if write then front, numbers, kept_until = write() end
    -- Whether the key outlives this reset and the time of counted denials; and, less a second, the latest that its
    -- expiry may be set to.
    local least, last = now_us + reset_after, math.max(kept_until or now_us + 2 * longest, now_us + reset_after)
    if denials > 0 then least = math.max(least, counted_until or denied_since + longest) end
    local covered, keep = server_time and armed * 1000000 >= least, last - now_us
    -- At a time that isn't the server's: at least an hour, and the next call in server time arms it anew.
    local armed_until, option, expires = (last + 1000000 - last % 1000000) / 1000000, 'PXAT', nil
    if not server_time then armed_until, option, expires = 0, 'PX', math.max(3600000, (keep + -keep % 1000) / 1000) end
    expires = string.format('%d', expires or armed_until * 1000)
    if save then
      alters = alters or rebased
      if not save(alters, counted, covered, armed_until, last, option, expires, tail, server_time) then break end
    elseif alters and tail == '' and reset_after == 0 then
      redis.call('DEL', key)
    elseif alters or rebased or (counted and not state) then
      if covered and not (changed or rebased or noted or tail ~= '') and armed * 1000000 <= last + 1000000 then
        redis.call('SETRANGE', key, '0', front)
      else
        redis.call('SET', key, front .. struct.pack('<I5', armed_until) .. numbers .. tail, option, expires)
      end
    elseif counted and not server_time then
      -- The state as it was written, kept as long as others that are decided at a caller's time.
      redis.call('SET', key, string.sub(state, 1, #front) .. '\0\0\0\0\0' .. string.sub(state, #front + 6, STATE)
        .. tail, option, expires)
    else
      if counted then redis.call('SETRANGE', key, string.format('%d', STATE), tail) end
      if (changed or counted) and not covered and server_time then
        -- Denied, and the key would expire before it resets under the new numbers, or before its denials are forgotten.
        -- In this order: out of memory, Redis refuses a SETRANGE, but no PEXPIREAT.
        redis.call('SETRANGE', key, string.format('%d', #front), struct.pack('<I5', armed_until))
        redis.call('PEXPIREAT', key, expires)
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
if packed and (key_count > 1 or not fault) then return table.concat(answers) end
return redis.error_reply(fault)
