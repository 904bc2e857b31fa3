-- concurrency: admits at most `limit` permits held at once, each until it is released or expires.
--
-- ARGV, before cost, mode and now_us
--   ARGV[1] limit   permits  1 .. 10000
--   ARGV[2] ttl     us       1 .. 2^51  how long a permit lasts that is neither renewed nor released
--   ARGV[3] holder  -        the id that permits are held by: any bytes; empty to look as somebody new
--   Modes also: renew | release. A cost is of permits; +as-is and +reset do nothing.
--
-- Reply of inspect
--   [7] time_us         us       when the state was written
--   [8] held            permits
--   [9] first_us        us       when the first of them expires, 0 without any
--   [10] last_us        us       when the last of them expires
--   Denials are counted for a ttl from the first of them. What at-most grants may be held already.
--
-- Formula
--   A sorted set: a member `n:holder` for each permit, scored by the time at which it expires. With scores below 0:
--   the time of the last write and, for a blocked key or one whose denials are counted, these.
--   allowed    : unexpired permits of others + cost <= limit; the holder's own then start anew, and it takes only
--                 those that it lacks to the cost
--   retry_after: until enough of the oldest have expired for the cost to fit
--   renew      : the holder's permits last for a ttl from now; the error BADID if it has none
--   release    : gives back all of the holder's permits; refund: as many as the cost
--   penalty    : as many more as the cost for the holder, up to 20000 permits in all
--   Under a lowered limit, a holder of more keeps them all while it renews them, or asks again for no more than the
--   limit: no other holder gets one until fewer than the limit are held.
--   After a change of ttl a permit lasts as long as it was given, but no longer than a ttl from the last write.
--
-- Source
--   Dijkstra's counting semaphore, with leases: Gray and Cheriton, "Leases", SOSP 1989.
--
-- Commands
--   TIME, EXISTS, ZRANGE, ZCOUNT, ZSCORE; what takes or gives: ZADD, ZREM, ZREMRANGEBYSCORE, PEXPIRE, PEXPIREAT; reset,
--   and the last permit's release: DEL; inspect: PTTL. What takes or gives first asks (redis.acl_check_cmd) whether the
--   caller may run those that come after its first write, and is refused before it if not.
--
-- Expiry
--   Every write arms it for twice the ttl, or this reset if a block made it longer.
--
-- A deny writes
--   as with every algorithm, except that the numbers aren't written: a change of them extends nothing.

local NAME, ARGUMENTS = 'concurrency', 'limit, ttl, holder'
local limit, ttl, holder, longest = a, b, ARGV[3], b
fast = false
local valid = #ARGV == 6 and limit >= 1 and limit <= 10000 and ttl >= 1 and ttl <= 2^51 and limit % 1 + ttl % 1 == 0
local LENGTH, RESERVES, STATE, LAYOUT_AT

-- Permits don't come and go by time alone, so everything is decided here.
function decide(mode, overage, block_for)
  local key = KEYS[1]
  local holds = mode == 'acquire' or mode == 'at-most' or mode == 'renew' or mode == 'release' or mode == 'refund'
    or mode == 'penalty'
  if not (valid and cost >= 0 and at_us >= -1 and at_us <= 2^52) or cost % 1 + at_us % 1 ~= 0
    or (not holds and mode ~= 'peek' and mode ~= 'block' and mode ~= 'reset' and mode ~= 'inspect')
    or (holds and holder == '') or (mode == 'block' and cost > 2^51) then
    return redis.error_reply('BADARG concurrency: expected whole numbers in the ranges of its header, a holder and a '
      .. 'mode, got ' .. string.gsub(table.concat(ARGV, ' '), '[^ -~]', '?'))
  end

  if mode == 'reset' then
    redis.call('DEL', key)
    return { 1, limit, limit, 0, 0 }
  end

  local server_time = at_us == -1
  local function after(time) return '(' .. string.format('%d', time) end

  local notes = {}
  local noted = redis.call('ZRANGE', key, '-inf', '0', 'BYSCORE', 'WITHSCORES')
  for index = 1, #noted, 2 do notes[noted[index]] = -noted[index + 1] end
  local exists = #noted > 0
  local blocked_until, denied_since, denials = notes.blocked or 0, notes.denied or 0, notes.denials or 0
  if (exists and not (notes.time and notes.time <= 2^53 and blocked_until <= 2^53 and denied_since <= 2^53
      and denials <= 2^53 and notes.time % 1 + blocked_until % 1 + denied_since % 1 + denials % 1 == 0))
    or (not exists and redis.call('EXISTS', key) == 1) then
    return redis.error_reply('BADSTATE concurrency: the key holds something else than this limit\'s state')
  end

  -- `gap` is how far the permits' own times lie ahead of the time of the decision.
  local time, gap, rebased = now_us, 0, false
  local stamp = notes.time or now_us
  local due = stamp + ttl
  if stamp > now_us then
    if blocked_until <= now_us and redis.call('ZCOUNT', key, after(stamp), '+inf') == 0 then
      stamp = now_us
    elseif stamp - now_us > ttl then
      gap, rebased = stamp - now_us, true
      blocked_until = blocked_until - gap
    else
      time = stamp
    end
  end
  if mode == 'block' then blocked_until = cost > 0 and now_us + cost or 0 end
  local blocked = blocked_until > now_us
  if denials > 0 and (now_us < denied_since or now_us - denied_since >= ttl) then denials = 0 end

  local passed = time + gap
  local live = due > passed and redis.call('ZCOUNT', key, after(passed), '+inf') or 0
  local function expiry(score) return math.ceil(math.min(score, due)) - gap end

  -- All permits of a holder expire together.
  local kept, kept_until = 0, 0
  if holder ~= '' and live > 0 then
    local function has(n)
      local score = redis.call('ZSCORE', key, n .. ':' .. holder)
      if not score or score + 0 <= passed then return false end
      kept, kept_until = n, expiry(score + 0)
      return true
    end
    local above = 1
    while has(above) do above = above * 2 end
    while above - kept > 1 do
      local middle = (above + kept - (above + kept) % 2) / 2
      if not has(middle) then above = middle end
    end
  end
  local others = live - kept
  if others < 0 then
    return redis.error_reply('BADSTATE concurrency: the key holds something else than this limit\'s state')
  end

  local remaining = math.max(limit - live, 0)
  local wanted = cost
  if mode == 'at-most' then wanted = math.min(cost, math.max(remaining + kept, 1)) end
  -- A holder that asks again, after a timeout, needs only the permits that it lacks.
  local again = kept >= wanted and (not blocked or kept_until > blocked_until)
  local fits = wanted == 0 or (wanted <= limit and (again or wanted <= limit - others))
  local allowed = fits and not blocked

  local take, give, renew = 0, 0, false
  if mode == 'renew' then
    if kept == 0 then return redis.error_reply('BADID concurrency: no permit is held by this id') end
    fits, allowed, renew = true, true, true
  elseif mode == 'release' then
    fits, allowed, give = true, true, kept
  elseif mode == 'refund' then
    fits, allowed, give = true, true, math.min(cost, kept)
  elseif mode == 'penalty' then
    fits, allowed, take = true, true, math.min(cost, math.max(20000 - live, 0))
    renew = take > 0
  elseif mode == 'block' then
    fits, allowed = true, true
  elseif allowed and wanted > 0 and mode ~= 'peek' and mode ~= 'inspect' then
    take, renew = math.max(wanted - kept, 0), true
  end

  local retry_after = 0
  if not fits and wanted > limit then
    retry_after = -1
  elseif not fits then
    -- The holder's own permits don't count against it, so they are skipped.
    local at = others + wanted - limit - 1
    if kept > 0 and at >= redis.call('ZCOUNT', key, after(passed), after(math.min(kept_until + gap, due))) then
      at = at + kept
    end
    local last = redis.call('ZRANGE', key, after(passed), '+inf', 'BYSCORE', 'LIMIT', at, 1, 'WITHSCORES')
    retry_after = expiry(last[2] + 0) - now_us
  end

  -- A denial blocks the key, unless the cost could never be allowed.
  local writes = mode ~= 'peek' and mode ~= 'inspect'
  local blocks = block_for and writes and not allowed and not blocked and wanted <= limit
  if blocks then blocked_until, blocked = now_us + block_for, true end

  local given = {}
  for n = kept - give + 1, kept do given[n .. ':' .. holder] = true end
  live = live + take - give
  if take + give > 0 then remaining = math.max(limit - live, 0) end
  local reset_after = 0
  if renew then
    reset_after = time + ttl - now_us
  elseif live > 0 then
    -- The last permit to expire of those that stay: at most `give` of the last don't stay.
    local last = redis.call('ZRANGE', key, '+inf', after(passed), 'BYSCORE', 'REV', 'LIMIT', 0, give + 1, 'WITHSCORES')
    local at = 1
    while given[last[at]] do at = at + 2 end
    reset_after = expiry(last[at + 1] + 0) - now_us
  end

  if blocked then
    remaining, reset_after = 0, math.max(reset_after, blocked_until - now_us)
    if not allowed and retry_after >= 0 then retry_after = math.max(retry_after, blocked_until - now_us) end
  end

  local counted = overage and not allowed and writes
  if counted then
    if denials == 0 then denied_since = now_us end
    denials = denials + 1
  end

  -- The first of these commands that this user may not run, or the server doesn't have. Asked before anything is
  -- written: refused half-way, a call would take a permit for nobody, and leave it without an expiry.
  local function refused(commands)
    for _, command in ipairs(commands) do
      local known, may = pcall(redis.acl_check_cmd, command, key, '1', '1')
      if not (known and may) then
        local why = known and "NOPERM this user may not run the '%s' command" or "ERR unknown command '%s'"
        return redis.error_reply(string.format(why, string.lower(command)))
      end
    end
  end

  -- Lua passes some thousands of arguments at most.
  local function remove_all(list)
    for from = 1, #list, 1000 do redis.call('ZREM', key, unpack(list, from, math.min(from + 999, #list))) end
  end

  local settles = take > 0 or give > 0 or renew or mode == 'block' or blocks
  if settles and live == 0 and not blocked and denials == 0 then
    redis.call('DEL', key)
  elseif settles or (rebased and writes) or counted then
    local add, remove = {}, {}
    local function put(member, score) add[#add + 1], add[#add + 2] = string.format('%d', score), member end
    local function note(name, value)
      if value then put(name, -value) elseif notes[name] then remove[#remove + 1] = name end
    end
    note('denied', denials > 0 and denied_since)
    note('denials', denials > 0 and denials)
    note('blocked', blocked and blocked_until)
    if settles or rebased or not exists then
      note('time', time)
      -- Permits that last longer than they may, or lie ahead.
      local moved = redis.call('ZRANGE', key, after(gap > 0 and passed or due), '+inf', 'BYSCORE', 'WITHSCORES')
      for index = 1, #moved, 2 do
        if not given[moved[index]] then put(moved[index], expiry(moved[index + 1] + 0)) end
      end
      if gap > 0 then
        for _, member in ipairs(redis.call('ZRANGE', key, '1', string.format('%d', passed), 'BYSCORE')) do
          remove[#remove + 1] = member
        end
      end
      if renew then
        for n = 1, kept + take do put(n .. ':' .. holder, time + ttl) end
      end
      for member in pairs(given) do remove[#remove + 1] = member end
    end
    local trims = gap == 0 and (settles or rebased or not exists)
    if redis.acl_check_cmd then
      local needs = { server_time and 'PEXPIREAT' or 'PEXPIRE' }
      if give > 0 then needs[2] = 'ZADD' end
      if #remove > 0 then needs[#needs + 1] = 'ZREM' end
      if trims then needs[#needs + 1] = 'ZREMRANGEBYSCORE' end
      local refusal = refused(needs)
      if refusal then return refusal end
    end
    -- If Redis is out of memory, a call that only gives back still succeeds if it removes first.
    if give > 0 then remove_all(remove) end
    for from = 1, #add, 1000 do redis.call('ZADD', key, unpack(add, from, math.min(from + 999, #add))) end
    local keep = math.max(2 * ttl, reset_after)
    if server_time then
      redis.call('PEXPIREAT', key, string.format('%d', (now_us + keep + -(now_us + keep) % 1000) / 1000))
    else
      -- The decision's time is not the server's: at least an hour, and the next call in server time arms it anew.
      redis.call('PEXPIRE', key, string.format('%d', math.max(3600000, (keep + -keep % 1000) / 1000)))
    end
    if give == 0 then remove_all(remove) end
    if trims then redis.call('ZREMRANGEBYSCORE', key, '1', string.format('%d', passed)) end
  end

  local answer = { allowed and 1 or 0, limit, remaining, retry_after, reset_after }
  if mode == 'at-most' then
    answer[6] = allowed and wanted or 0
  elseif mode == 'inspect' then
    local first = redis.call('ZRANGE', key, after(passed), '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
    local last = redis.call('ZRANGE', key, '+inf', after(passed), 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
    for index, field in ipairs({ redis.call('PTTL', key), stamp, live, live > 0 and expiry(first[2] + 0) or 0,
      live > 0 and expiry(last[2] + 0) or 0 }) do
      answer[5 + index] = field
    end
  end
  if not (blocked or overage or mode == 'inspect') then return answer end
  answer[#answer + 1] = blocked and blocked_until - now_us or 0
  answer[#answer + 1] = denials
  return answer
end
