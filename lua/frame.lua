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
--   refund     : gives the cost back, up to what is used; +taken: at most what is still owed of units taken then;
--                penalty: takes it, whether it is there or not, as far as numbers stay exact
--   block      : denies every call until it ends; a refund or a penalty changes the state beneath it. +block: a denial
--                starts one, unless the key is blocked already or the cost could never be allowed
--   +within    : a reserve that would wait longer than these us is denied, and retry_after is that wait. A reserve or
--                peek of cost 0 answers how long until no units are owed, and fixed_window what remains then
--   numbers that differ from the state's: what was used stays used, and both versions' levels are charged from then on,
--                until the other is forgotten; with +as-is, what was left stays left; with +reset, the key is as if
--                never used
--
-- Commands
--   TIME, GET, MGET; what takes or gives: SET, SETRANGE, PEXPIREAT; reset, and what leaves
--   the key as if never used, such as a refund of all of which it isn't known when it was taken: DEL; inspect: PTTL
--
-- Expiry
--   SET sets it to twice the longest reset, or to this reset if a penalty, a block or another version made it longer,
--   plus up to a second; SETRANGE keeps it while it covers this reset. A peek doesn't extend it after a change of
--   numbers.
--
-- A deny writes
--   nothing, except in four cases: the state's time lay too far ahead and is brought back to now, or the
--   key is forgotten if nothing is used of it; the numbers have
--   changed so that the key, or what it holds of the call's version, would expire before it resets under these, and
--   that expiry alone is extended;
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

-- A mode may carry options: how changed numbers are treated, that denials are counted, that they block, how long a
-- reservation may wait, and whether what is taken may be given back by its id.
local as_is, afresh, overage, block_for, within, remembered = false, false, false, false, nil, false
-- Of a refund: when the units were taken, how many, what was missing then, under which numbers, what had been given
-- back before, or when the key was to reset.
local since, took, missing, parts, made_under, refunded_before, resets
if mode ~= 'acquire' then
  mode = string.gsub(mode, '%+[%a-]+=?[%d,-]*', function(option)
    as_is, afresh, overage = as_is or option == '+as-is', afresh or option == '+reset', overage or option == '+overage'
    local us = tonumber(string.match(option, '^%+block=(%d+)$'))
    if us and us >= 1 and us <= 2^51 and not block_for then
      block_for = us
      return ''
    end
    us = tonumber(string.match(option, '^%+within=(%d+)$'))
    if us and us <= 2^51 and not within then
      within = us
      return ''
    end
    local ago, reset_after = string.match(option, '^%+taken=(%d+),(%d+)$')
    if ago and ago + 0 <= 2^52 and reset_after + 0 <= 2^52 then
      since, missing, resets = math.max(now_us - ago, 0), 0, now_us - ago + reset_after
      return ''
    end
    local owes = { string.match(option, '^%+owed=(%-?%d+),(%d+),(%d+),(%d+),(%d+)$') }
    if owes[1] then
      since, took, missing, made_under = owes[1] + 0, owes[2] + 0, owes[3] + 0, owes[4] + 0
      refunded_before = owes[5] + 0
      return ''
    end
    remembered = remembered or option == '+remembered'
    return (option == '+as-is' or option == '+reset' or option == '+overage' or option == '+remembered') and '' or nil
  end)
end
if decide then return decide(mode, overage, block_for) end
local known = mode == 'acquire' or mode == 'peek' or mode == 'at-most' or mode == 'refund' or mode == 'penalty'
  or mode == 'reset' or mode == 'inspect' or (mode == 'reserve' and RESERVES) or (mode == 'block' and cost <= 2^51)
if not (valid and known and cost >= 0 and cost % 1 == 0 and key_count <= 7999
  and (not several or #several == EACH * key_count)
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

-- That of the call's own numbers, for algorithms whose versions have a state each.
local function version()
  if not under then return 0 end
  local _, numbers = write()
  return version_of(numbers)
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

-- Two versions of a rule may be in force at once. Each has a level of its own, which both charge. That of the version
-- that didn't write last has the second until which it is in force in any case in place of its expiry: the longest
-- reset of both after it was last written. Returns the state that this call starts from, the other version's, if any,
-- and whether the former is to be restored again.
local function versions_of(last, other, changed, blocked)
  local expiry_at = LAYOUT_AT - 5
  local own, again = last, false
  if other and now_us >= struct.unpack('<I5', other, expiry_at) * 1000000 then
    -- It goes, unless it says more about this key than what was written last: if it has the larger capacity, and more
    -- is used of it.
    again = true
    local _, most = under(last)
    local _, its_most = under(other)
    local more = its_most > most
    if more then
      local _, _, _, its_free, its_reset = restore(other, false)
      local _, _, _, free, reset = restore(last, false, false, false, scaled)
      more = its_reset and reset and (its_reset > reset or its_free < free)
    end
    under()
    if not more then other = nil end
  end
  if not changed then return own, other, again end
  if as_is or afresh then return own, nil, again end
  local its_longest = under(last)
  -- After a penalty it may take longer.
  local _, _, _, _, its_reset = restore(last, false)
  under()
  again = true
  local until_us = struct.unpack('<I7', last) + math.max(longest, its_longest)
  if its_reset and its_reset > 0 then until_us = math.max(until_us, now_us + its_reset) end
  until_us = until_us + -until_us % 1000000
  local before = now_us < until_us and string.sub(last, 1, expiry_at - 1)
    .. struct.pack('<I5', math.min(until_us / 1000000, 2^40 - 1)) .. string.sub(last, LAYOUT_AT) or nil
  if other then
    local intact, differs = restore(other, blocked, false, false, scaled)
    if intact and not differs then
      -- Back under these numbers.
      own = other
    elseif struct.unpack('<I7', other, LAYOUT_AT + 1) > struct.unpack('<I7', last, LAYOUT_AT + 1) then
      -- A third version begins with what the larger of the others has used.
      own, before = other, other
    end
  end
  return own, before, again
end

-- What a key holds, apart: the state that was written last, the state under the other numbers in force, how many units
-- were refunded of late and when; where the tail begins of a key that is blocked or whose denials are counted, and the
-- tail's numbers. Nothing, if it is something else than a limit's state.
local function parts_of(held)
  -- With a debt, its layout is above 8, and the state longer.
  local greatest, debt, refunds, tail = RESERVES and 8 or 255, 7, 14, 18
  local length = (string.byte(held, LAYOUT_AT) or 0) > greatest and STATE + debt or STATE
  if #held == length then return held, nil, 0, nil, nil, 0, 0, 0 end
  local at, other, refunded, refunded_at = length + 1, nil, 0, nil
  if under and #held >= length + STATE then
    local its_length = string.byte(held, length + LAYOUT_AT) > greatest and STATE + debt or STATE
    other, at = string.sub(held, at, at + its_length - 1), at + its_length
  end
  if #held < at - 1 then return end
  if under and (#held - at + 1) % tail == refunds then
    refunded, refunded_at = struct.unpack('<I7I7', held, at)
    at = at + refunds
  end
  local last, rest = string.sub(held, 1, length), #held - at + 1
  if rest == tail then return last, other, refunded, refunded_at, at, struct.unpack('<I7I7I4', held, at) end
  if rest == 0 then return last, other, refunded, refunded_at, nil, 0, 0, 0 end
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

-- Key by key, in five steps: what the key holds, what that comes to by now, what the call takes, the write, the answer.
-- They are no functions, which would cost a call a fifth more, for the variables that they share. A key whose state
-- turns out to be unreadable is left as it is.
for index = 1, key_count do
  if not answers[index] then
    local key, held = KEYS[index], state
    if states then held = states[index] end
    if several then cost, calls = struct.unpack('<I7I3', several, (index - 1) * EACH + 1) end
    -- Nothing that this call has written since is known.
    if repeated and repeated[index] then held = nil end

    -- What the key holds: false if nothing, nil if it can't be read. Only a key that is blocked, or whose denials are
    -- counted, has a tail; and a log that a refund wrote last.
    local tail_at, blocked_until, denied_since, denials = nil, 0, 0, 0
    if read then
      held, tail_at, blocked_until, denied_since, denials = read(key, key_count > 1, held)
    elseif key_count > 1 and not held then
      -- MGET returns nothing for a key of another type.
      held = redis.pcall('GET', key)
    end
    if type(held) == 'table' then
      -- Any other refusal than of another type, such as a missing permission, ends the call.
      if not string.find(held.err, '^WRONGTYPE') then
        return redis.error_reply(held.err .. (read and ' command: getrange' or ' command: get'))
      end
      held = nil
    end
    local last, other, refunded, refunded_at = held, nil, 0, nil
    if held and not read then
      last, other, refunded, refunded_at, tail_at, blocked_until, denied_since, denials = parts_of(held)
    end
    local readable = last ~= nil and blocked_until <= 2^53

    -- What it comes to by now: when the key's expiry is armed for, whether its numbers have changed, how far ahead of
    -- now its time was, what remains, and until when.
    local armed, changed, ahead, remaining, reset_after
    -- If the call's version isn't the one that wrote last: where its state says, in five bytes, until when it is kept.
    local returns_at
    local rewrites, rebased = other or refunded_at, false
    if readable then
      local is_blocked = blocked_until > now_us
      armed, changed, ahead, remaining, reset_after = restore(last, is_blocked, as_is, afresh, scaled, mode)
      rewrites = rewrites or changed
      if armed and under and (changed or other) and last then
        local own, before, again = versions_of(last, other, changed, is_blocked)
        if own == other and before ~= other then returns_at = #last + LAYOUT_AT - 5 end
        other = before
        if again then
          local _
          _, _, ahead, remaining, reset_after = restore(own, is_blocked, as_is, afresh, scaled, mode)
        end
      end
      readable = armed and reset_after
      if readable then blocked_until, rebased = blocked_until - ahead, ahead > 0 end
    end

    -- What the call takes.
    local wanted, allowed, retry_after = cost, calls, 0
    local blocked, counted, blocks, tail = false, false, false, ''
    local moved, alters, units, units_of_other = false, false, 0, nil
    -- What a refund by the call's id has to know.
    local since_now, missing_now, parts_now
    if readable then
      if mode == 'at-most' then wanted = math.min(cost, math.max(remaining, 1)) end
      -- How many of the calls are allowed.
      if wanted * calls > remaining then
        if debt > 0 and wanted <= most and wait(wanted, debt) == 0 then
          retry_after = wait(wanted, 0)
          -- Its own wait is what a denial answers.
          if within and retry_after > within then allowed, debt = 0, 0 end
        else
          allowed = (remaining - remaining % wanted) / wanted
        end
      elseif within and wanted == 0 and RESERVES and (mode == 'reserve' or mode == 'peek') then
        retry_after = wait(0, 0)
        if remaining_after_debt then remaining = remaining_after_debt() end
      end
      local may_move = writes
      if tail_at or not plain then
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

      if may_move then units = allowed * wanted end
      if refunded_at and now_us >= refunded_at + longest then refunded, refunded_at = 0, nil end
      if since and mode == 'refund' and made_under and made_under ~= version() then
        -- What is still owed of another version's call isn't known under these numbers.
        units, units_of_other = 0, 0
      elseif since and mode == 'refund' then
        parts = taken and select(3, taken()) or 1
        -- What others gave back since was taken before or after these units: at most all that was missing before them.
        -- But a reservation that is still to wait has used nothing.
        local left, of_one = owed(limit + 1, since, missing, parts, resets)
        local waits = RESERVES and left > limit * (of_one or 1)
        local others = waits and 0 or math.max(refunded - (refunded_before or refunded), 0)
        missing = math.max(missing - others * parts, math.min((took or units) * parts, missing))
        local given, of_a_unit = owed(units, since, missing, parts, resets)
        local rest = given % (of_a_unit or 1)
        units = (given - rest) / (of_a_unit or 1)
        -- Under the other numbers too, only what hasn't begun is surely owed still.
        units_of_other = waits and units or 0
        if rest > 0 then units = units + 1 end
      end
      if units > 0 then moved, remaining, reset_after = move(units, mode) end
      if moved and mode == 'refund' and RESERVES and (since or refunded_at) then
        refunded, refunded_at = math.min(refunded + units, 2^53), now_us
      end
      if allowed < calls and wanted > 0 then retry_after = wanted > most and -1 or wait(wanted, debt) end
      if remembered then
        since_now, missing_now, parts_now = now_us, 0, 1
        if taken then since_now, missing_now, parts_now = taken() end
      end
      readable = remaining and retry_after
      if readable and blocked then
        remaining, reset_after = 0, math.max(reset_after, blocked_until - now_us)
        if allowed == 0 and retry_after >= 0 then retry_after = math.max(retry_after, blocked_until - now_us) end
      end
      alters = moved or mode == 'block' or blocks
    end

    -- The write.
    local front, numbers, kept_until
    if readable and writes and (alters or changed or rebased or counted) then
      if write then front, numbers, kept_until = write() end
      -- Another debt alone is no change, but written too.
      rewrites = rewrites or RESERVES and last and string.sub(last, LAYOUT_AT) ~= numbers
      local keeps_for, others = reset_after, ''
      if (alters or rebased) and other then
        -- The units are taken or given back under the other numbers too. What exceeds a level is forgiven, as by a
        -- change to its numbers.
        under(other)
        local its_units = moved and (units_of_other or units) or 0
        local intact, _, _, _, its_reset = restore(other, false)
        if intact and its_units > 0 then _, _, its_reset = move(its_units, mode == 'refund' and mode or 'other') end
        others = other
        if intact then
          local its_front = write()
          others = its_front .. string.sub(other, #its_front + 1)
          keeps_for = math.max(reset_after, math.min(its_reset, 2^51))
        end
        under()
      end
      if refunded_at then others = others .. struct.pack('<I7I7', refunded, refunded_at) end
      -- Whether the key outlives this reset and the time of counted denials; and, less a second, the latest that its
      -- expiry may be set to.
      local least, latest = now_us + keeps_for, math.max(kept_until or now_us + 2 * longest, now_us + keeps_for)
      if denials > 0 then least = math.max(least, counted_until or denied_since + longest) end
      local covered, keep = server_time and armed * 1000000 >= least, latest - now_us
      -- At a time that isn't the server's: at least an hour, and the next call in server time arms it anew.
      local armed_until, option, expires = (latest + 1000000 - latest % 1000000) / 1000000, 'PXAT', nil
      if not server_time then
        armed_until, option, expires = 0, 'PX', math.max(3600000, (keep + -keep % 1000) / 1000)
      end
      expires = string.format('%d', expires or armed_until * 1000)
      -- A denied version is kept until it resets, so that its wait stays true.
      local returns
      if returns_at and not alters and not rebased
        and struct.unpack('<I5', held, returns_at) * 1000000 < now_us + reset_after then
        local until_us = now_us + reset_after
        returns = struct.pack('<I5', math.min((until_us - until_us % 1000000) / 1000000 + 1, 2^40 - 1))
        held = string.sub(held, 1, returns_at - 1) .. returns .. string.sub(held, returns_at + 5)
      end
      if save then
        alters = alters or rebased
        readable = save(alters, counted, covered, armed_until, latest, option, expires, tail, server_time)
      elseif (alters or rebased) and tail == '' and keeps_for == 0 and not refunded_at then
        redis.call('DEL', key)
      elseif alters or rebased or (counted and not held) then
        if covered and not (rewrites or rebased or tail_at or others .. tail ~= '')
          and armed * 1000000 <= latest + 1000000 then
          redis.call('SETRANGE', key, '0', front)
        else
          redis.call('SET', key, front .. struct.pack('<I5', armed_until) .. numbers .. others .. tail, option, expires)
        end
      elseif counted and not server_time then
        -- The state as it was written, kept as long as others that are decided at a caller's time.
        redis.call('SET', key, string.sub(held, 1, #front) .. '\0\0\0\0\0'
          .. string.sub(held, LAYOUT_AT, (tail_at or 0) - 1) .. tail, option, expires)
      else
        if counted then redis.call('SETRANGE', key, string.format('%d', tail_at and tail_at - 1 or #held), tail) end
        if returns then redis.call('SETRANGE', key, string.format('%d', returns_at - 1), returns) end
        if (changed or counted) and not covered and server_time then
          -- Denied, and the key would expire before it resets under the new numbers, or before its denials are
          -- forgotten. Until that is extended the state doesn't say when it expires, so that the next call tries again if
          -- it is refused. And out of memory, Redis refuses a SETRANGE, but no PEXPIREAT.
          redis.call('SETRANGE', key, string.format('%d', #front), '\0\0\0\0\0')
          redis.call('PEXPIREAT', key, expires)
          redis.call('SETRANGE', key, string.format('%d', #front), struct.pack('<I5', armed_until))
        end
      end
    end

    -- The answer.
    if not readable and changed == 'STALE' then
      -- The call's windows don't show which window this state belongs to.
      fault, answers[index] = stale, struct.pack('<i7i7i7i7', -1, 0, now_us, -3)
    elseif not readable then
      fault = 'BADSTATE ' .. NAME .. ': the key holds something else than this limit\'s state'
      answers[index] = struct.pack('<i7i7i7i7', -1, 0, 0, -2)
    elseif packed and allowed == calls and not blocked then
      answers[index] = struct.pack('<i7i7', remaining, reset_after)
    elseif packed then
      answers[index] = struct.pack('<i7i7i7i7', -1 - remaining, reset_after, retry_after, blocked and -1 or allowed)
    else
      local answer = { allowed, limit, remaining, retry_after, reset_after }
      if mode == 'at-most' then
        answer[6] = allowed * wanted
      elseif mode == 'inspect' then
        if write and not held then
          front, numbers = write()
          held = front .. struct.pack('<I5', 0) .. numbers
        end
        answer[6] = redis.call('PTTL', key)
        for at, field in ipairs(inspect(held)) do answer[6 + at] = field end
      end
      if remembered then
        answer.since, answer.missing, answer.parts, answer.refunded = since_now, missing_now, parts_now, refunded
        answer.version = version()
      end
      if blocked or overage or mode == 'inspect' then
        answer[#answer + 1] = blocked and blocked_until - now_us or 0
        answer[#answer + 1] = denials
      end
      return answer
    end
  end
end
if packed and (key_count > 1 or not fault) then return table.concat(answers) end
return redis.error_reply(fault)
