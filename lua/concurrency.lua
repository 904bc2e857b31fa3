-- concurrency: admits at most `limit` permits held at once, each until it is released or expires.
--
-- Numbers
--   limit   permits  1 .. 10000
--   ttl     us       1 .. 2^51  how long a permit lasts that is neither renewed nor released
--   packed: BI2I7: 6, these; each call's holder is an argument of its own, ARGV[4] that of the first call
--   holder  -        text form: the id that permits are held by: any bytes; empty to look as somebody new
--
-- State; inspect lists time, permits held, when the first and when the last of them expires, 0 without any
--   A sorted set: a member `n:holder` for each permit, scored by the time at which it expires, and one with score -1:
--   the time of the last write, I7, and what keys.lua notes.
--
-- Formula
--   allowed: unexpired permits of others + cost <= limit; the holder's own then start anew, and it takes only those
--            that it lacks to the cost. Under a lowered limit, a holder of more keeps them all while it renews them,
--            or asks again for no more than the limit
--   wait     until enough permits of others have expired
--   renew    the holder's permits last for a ttl from now; the error BADID if it has none
--   release, cancel: gives back all of the holder's permits; refund: as many as the cost
--   penalty  as many more as the cost for the holder, up to 20000 permits in all; settle changes nothing
--   After a change of ttl a permit lasts as long as it was given, but no longer than a ttl from the last write.
--
-- Source
--   Dijkstra's counting semaphore, with leases: Gray and Cheriton, "Leases", SOSP 1989.
--
-- Commands
--   EXISTS, ZRANGE, ZCOUNT, ZSCORE; what takes or gives: ZADD, ZREM, ZREMRANGEBYSCORE, PEXPIRE, PEXPIREAT. It first
--   asks (redis.acl_check_cmd) whether the caller may run those after its first write, and is refused if not.

-- Asked before a call's first write: refused half-way, it would take a permit for nobody, without an expiry. Of the
-- first key, whether the caller may run all that permits need; of the others, what follows. What is refused is run all
-- the same, each on a line of its own, by which clients name it.
local asked, lacked = false, false
local function lacks(command, key)
  local known, may = pcall(redis.acl_check_cmd, command, key, '1', '1')
  lacked = lacked or redis.acl_check_cmd and not (known and may)
  return lacked
end
local function ask_rights(key, expire, adds, removes, passes)
  lacked = false
  if expire == 'PEXPIRE' and lacks('PEXPIRE', key) then call('PEXPIRE', key, '1') end
  if expire == 'PEXPIREAT' and lacks('PEXPIREAT', key) then call('PEXPIREAT', key, '1') end
  if adds and lacks('ZADD', key) then call('ZADD', key, '1', '1') end
  if (removes or not asked) and lacks('ZREM', key) then call('ZREM', key, '1') end
  if (passes or not asked) and lacks('ZREMRANGEBYSCORE', key) then call('ZREMRANGEBYSCORE', key, '1', '1') end
  asked = asked or not lacked
end

-- The short way, without a count or options.
local short = live and #shape == 19 and byte(shape) == 6 and byte(shape, 12) == 0 and each and #each == 10 * #KEYS
  and #ARGV == 3 + #KEYS
local _, limit, ttl, code = unpacked('<BI2I7B', short and #KEYS > 0 and shape or string.rep('\0', 11))
short = (code == 128 or code == 139) and limit >= 1 and limit <= 10000 and ttl >= 1 and ttl <= 2^51
-- What is the same for all calls.
local note, until_us, expires, unused
if short then
  local latest = now + 2 * ttl
  note, until_us, unused = pack('<I7', now), string.format('%d', now + ttl), pack('<i7i7i7i3', limit, 0, 0, 1)
  expires = string.format('%d', (latest + 1000000 - latest % 1000000) / 1000)
end

-- A plain acquire by a holder of no permit, and a release by one of a single permit: on a set whose permits all last,
-- no longer than they may, and of which nothing is noted. Returns the answer; nothing if it isn't so.
local function shortly(key, holder, takes, units)
  local own, members = '1:' .. holder, redis.pcall('ZRANGE', key, '0', '2')
  local was, held, reset = members[1], 0, ttl
  if members.err or was and (#was ~= 7 or unpacked('<I7', was) > now) then return end
  if not takes and members[2] == own and not members[3] then
    return call('DEL', key) and unused
  elseif was then
    held = call('ZCOUNT', key, '1', '+inf')
    local has, due = call('ZSCORE', key, own), string.format('%d', unpacked('<I7', was) + ttl)
    if takes == (has ~= false) or not takes and call('ZSCORE', key, '2:' .. holder) or held + units > limit
      or call('ZCOUNT', key, string.format('(%d', now), due) ~= held then
      return
    end
  elseif not takes or units > limit then
    return
  end
  if was == note then was = nil end
  ask_rights(key, 'PEXPIREAT', not takes, was, false)
  if takes then
    local added = { '-1', note, until_us, own }
    for n = 2, units do added[2 * n + 1], added[2 * n + 2] = until_us, n .. ':' .. holder end
    if not call('ZADD', key, unpack(added)) then return end
    if was then call('ZREM', key, was) end
  else
    if not call('ZREM', key, own, was or own) then return end
    call('ZADD', key, '-1', note)
    local last = call('ZRANGE', key, '+inf', '1', 'BYSCORE', 'REV', 'LIMIT', '0', '1', 'WITHSCORES')
    reset = math.ceil(last[2]) - now
  end
  return call('PEXPIREAT', key, expires) and pack('<i7i7i7i3', limit - held - units, reset, 0, 1)
end

-- Without a holder or with a count, the whole call is an error.
for index = 1, short and #KEYS or 0 do
  short = short and ARGV[3 + index] ~= '' and find(each, '\1\0\0', 10 * index - 9, true) == 10 * index - 9
end
missed = not short or not KEYS[1]
for index = 1, missed and 0 or #KEYS do
  local units = code == 139 and -1 or unpacked('<I7', each, index * 10 - 6)
  if units ~= 0 and units <= 1000 then
    answers[index] = shortly(KEYS[index], ARGV[3 + index], units > 0, units) or nil
  end
  missed = missed or not answers[index]
  -- Where a call is left, so are later ones of its key.
  if missed and shared then break end
end
if not missed then return table.concat(answers) end

local function after(time) return '(' .. string.format('%d', time) end

-- When a permit of this score expires, by the time of the decision.
local function expiry(set, score) return math.ceil(math.min(score, set.due)) - set.gap end

-- Lua passes some thousands of arguments at most.
local function in_parts(command, key, list)
  for from = 1, #list, 1000 do call(command, key, unpack(list, from, math.min(from + 999, #list))) end
end

-- As token_bucket.lua describes it: x is what is known of the set, y nothing.
ALGORITHMS[6] = {
  name = 'concurrency', arguments = 'limit, ttl, holder', most_of = { limit = 10000 }, holds = true,
  size = 10, format = '<BI2I7', width = 10, numbers_at = 1,
  -- The longest reset, and how long a state is kept; nothing if out of range.
  spans = function(limit, _, ttl)
    if limit >= 1 and limit <= 10000 and ttl >= 1 and ttl <= 2^51 then return ttl, 2 * ttl end
  end,
  -- Reads a set: what is known of it, the call's numbers, and what is noted.
  read = function(limit, key)
    local noted = redis.pcall('ZRANGE', key, '-inf', '0', 'BYSCORE')
    if noted.err then
      -- Another type is told by the caller; any other refusal, such as a missing right, ends the script here.
      if not find(noted.err, '^WRONGTYPE') then call('ZRANGE', key, '-inf', '0', 'BYSCORE') end
      return noted
    end
    local note = noted[1] or ''
    if (#noted == 0 and call('EXISTS', key) == 1) or #noted > 1 or (note ~= '' and #note ~= 7 and #note ~= 60) then
      return '', '', ''
    end
    local holder = ARGV[holders + ordinal] or ''
    return { key = key, limit = limit.most, note = note, holder = holder, give = 0 }, limit.numbers, sub(note, 8)
  end,
  -- What a set comes to: the permits that the holder can't get, what is known, and as of when; then nothing, and its
  -- time.
  level = function(set, now, _, ttl)
    local at, key, time = now, set.key, now
    if set.note ~= '' then time = unpacked('<I7', set.note) end
    if time > 2^53 then return end
    set.due, set.gap, set.time = time + ttl, 0, time
    set.blocked = #set.note == 60 and unpacked('<I7', set.note, 43) or 0
    if time - now > ttl then
      set.gap = time - now
    elseif time > now and call('ZCOUNT', key, after(time), '+inf') > 0 then
      at = time
    end
    local passed = at + set.gap
    local live = set.due > passed and set.note ~= '' and call('ZCOUNT', key, after(passed), '+inf') or 0
    -- All permits of a holder expire together.
    local kept, until_us, above = 0, 0, 1
    local function has(n)
      local score = call('ZSCORE', key, n .. ':' .. set.holder)
      if not score or score + 0 <= passed then return false end
      kept, until_us = n, score + 0
      return true
    end
    if set.holder ~= '' and live > 0 then
      while has(above) do above = above * 2 end
      while above - kept > 1 do
        local middle = (above + kept - (above + kept) % 2) / 2
        if not has(middle) then above = middle end
      end
    end
    if kept > live then return end
    set.live, set.kept, set.kept_until, set.passed = live, kept, until_us, passed
    return math.max(0, math.min(set.limit - kept, live - kept)), set, nil, at, 0, time
  end,
  -- How long until others have at most so many permits.
  wait = function(units, set)
    local at = set.live - set.kept - units - 1
    if at < 0 or (set.kept >= set.limit - units and set.kept_until > set.blocked) then return 0 end
    -- The holder's own permits don't count against it, so they are skipped.
    local own = math.min(set.kept_until, set.due)
    if set.kept > 0 and at >= call('ZCOUNT', set.key, after(set.passed), after(own)) then at = at + set.kept end
    local last = call('ZRANGE', set.key, after(set.passed), '+inf', 'BYSCORE', 'LIMIT', at, 1, 'WITHSCORES')
    return last[2] and expiry(set, last[2] + 0) - now or 0
  end,
  -- The permits that an operation takes; those that it gives back are noted.
  hold = function(set, operation, cost)
    if operation == 'penalty' then return cost > 0 and set.kept + math.min(cost, math.max(20000 - set.live, 0)) or 0 end
    if operation == 'refund' then set.give = math.min(cost, set.kept) end
    if operation == 'cancel' or operation == 'release' then set.give = set.kept end
    return operation == 'renew' and set.kept or 0
  end,
  -- Takes permits: all of the holder's start anew. Returns the state, the permits that are held, and how long until
  -- none is.
  take = function(units, set, _, at, ttl)
    set.target = units > 0 and math.max(set.kept, units) or nil
    local held = set.live + (set.target or set.kept) - set.kept - set.give
    if set.target then return set, nil, at, held, at + ttl - now end
    if held == 0 then return set, nil, at, 0, 0 end
    -- The last permit to expire of those that stay.
    local last = call('ZRANGE', set.key, '+inf', after(set.passed), 'BYSCORE', 'REV', 'LIMIT', 0, set.give + 1,
      'WITHSCORES')
    local given = {}
    for n = set.kept - set.give + 1, set.kept do given[n .. ':' .. set.holder] = true end
    local place = 1
    while given[last[place]] do place = place + 2 end
    return set, nil, at, held, expiry(set, last[place + 1] + 0) - now
  end,
  -- Writes a set. If Redis is out of memory, a call that only gives back still succeeds, since it removes first.
  write = function(limit, key, set, _, at, _, _, option, expires, tail)
    local add, remove, given, note = {}, {}, {}, pack('<I7', at) .. tail
    for n = set.kept - set.give + 1, set.kept do
      given[n .. ':' .. set.holder] = true
      remove[#remove + 1] = n .. ':' .. set.holder
    end
    local function put(member, score) add[#add + 1], add[#add + 2] = string.format('%d', score), member end
    put(note, -1)
    if set.note ~= '' and set.note ~= note then remove[#remove + 1] = set.note end
    -- Permits that last longer than they may, or lie ahead.
    local moved = call('ZRANGE', key, after(set.gap > 0 and set.passed or set.due), '+inf', 'BYSCORE', 'WITHSCORES')
    for index = 1, #moved, 2 do
      if not given[moved[index]] then put(moved[index], expiry(set, moved[index + 1] + 0)) end
    end
    local passed = string.format('%d', set.passed)
    for _, member in ipairs(set.gap > 0 and call('ZRANGE', key, '1', passed, 'BYSCORE') or {}) do
      remove[#remove + 1] = member
    end
    for n = 1, set.target or 0 do put(n .. ':' .. set.holder, at + limit.a) end
    local expire, gives = option == 'PX' and 'PEXPIRE' or 'PEXPIREAT', set.give > 0
    -- Permits that have passed.
    local passes = set.gap == 0 and set.note ~= '' and call('ZCOUNT', key, '1', '+inf') > set.live
    ask_rights(key, expire, true, #remove > 0, passes)
    if gives then in_parts('ZREM', key, remove) end
    in_parts('ZADD', key, add)
    if not gives then in_parts('ZREM', key, remove) end
    if passes then call('ZREMRANGEBYSCORE', key, '1', passed) end
    return call(expire, key, expires)
  end,
  inspect = function(set)
    local first = call('ZRANGE', set.key, after(set.passed), '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
    local last = call('ZRANGE', set.key, '+inf', after(set.passed), 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
    local live = set.live > 0
    return { set.time, set.live, live and expiry(set, first[2] + 0) or 0, live and expiry(set, last[2] + 0) or 0 }
  end,
}
