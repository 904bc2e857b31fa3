-- The arguments: what every script reads first, in either form, and the time. The script of a set of algorithms is the
-- text of this file, of the algorithms' files in the order of their numbers, of keys.lua and of decide.lua, which
-- describes KEYS, ARGV and the reply.
-- Contract 2: lua/README.md says what that promises.

-- The algorithms by number, which is the first byte of a limit's numbers; each file adds its own.
local ALGORITHMS = {}
local call, pack, unpacked = redis.call, struct.pack, struct.unpack
local find, sub, byte = string.find, string.sub, string.byte
-- The packed form: the shape, which begins with an algorithm's number; the time; each call's count and costs. In the
-- text form the time comes last, and `to_shape` below writes the shape.
local shape, at_us, each = ARGV[1] or '', ARGV[2], ARGV[3]
local packed = (byte(shape) or 32) < 32
if not packed then at_us, each = ARGV[#ARGV] or '', nil end
-- The time of the decision: the server's, unless the caller gives one.
local now = at_us and at_us ~= '-1' and (tonumber(at_us) or -2) or -1
local live = now == -1
if live then
  local clock = call('TIME')
  now = clock[1] * 1000000 + clock[2]
end
-- What the short way of an algorithm's file has read and answered, key by key, and whether it left any key over.
local states, answers, missed = nil, {}, true
-- Of calls that are listed, the keys that several of them have: later calls see what earlier ones took.
local shared
if each then
  local seen = {}
  for _, key in ipairs(KEYS) do
    if seen[key] then
      shared = shared or {}
      shared[key] = true
    end
    seen[key] = true
  end
end

-- The text form: `to_shape` packs it, called once the algorithms are known. It returns an error, if any.
-- Permits' holders are arguments, from there on, one for each call; `ordinal` counts the calls.
local keys, holders, ordinal, to_shape = KEYS, 4, 0, nil
if not packed then
  local at, fault, named, numbers_of, only, several, holder = 1, nil, {}, {}, nil, nil, nil

  -- The next argument as a whole number in this range. The first that isn't one is the fault.
  local function number(name, least, most)
    local value = tonumber(ARGV[at])
    at = at + 1
    if fault then return 0 end
    if not ARGV[at - 1] then
      fault = 'missing ' .. name
    elseif not value or value ~= value then
      fault = name .. ' is no number'
    elseif value < least or value > most or value % 1 ~= 0 then
      fault = name .. ' is out of range'
    end
    return fault and 0 or value
  end

  -- The numbers of a limit, whose own arguments come next.
  local function numbers(algorithm)
    local own = { numbers_of[algorithm] }
    for name in string.gmatch(algorithm.arguments, '[%a_]+') do
      if name == 'holder' then
        if not ARGV[at] then fault = fault or 'missing holder' end
        if holder and holder ~= ARGV[at] then fault = fault or 'one holder of all permits' end
        holder, holders, at = ARGV[at], at, at + 1
      else
        local least, most = find('start first second stop', name, 1, true) and -2^53 or 0, algorithm.most_of
        own[#own + 1] = number(name, least, name == 'tick' and 1000000 or most and most[name] or 2^53)
      end
    end
    return fault and '' or pack(algorithm.format, unpack(own))
  end

  -- A mode's options: their bits, and the values of those that have one, in the order of the bits. `taken` has a time,
  -- and a reset of each limit.
  local function options_of(mode, limit_count)
    local bits, values, known = 128, {}, { ['as-is'] = 1, reset = 2, overage = 4, block = 8, within = 16, taken = 64 }
    for option, given in string.gmatch(mode, '%+([^+=]*)=?([^+]*)') do
      local bit, value = known[option] or 0, ''
      for one in string.gmatch(given, '%d+') do value = value .. pack('<I7', math.min(tonumber(one), 2^53)) end
      local pattern = bit == 64 and '^%d+' .. string.rep(',%d+', limit_count) .. '$' or bit >= 8 and '^%d+$' or '^$'
      if bit == 0 or values[bit] then fault = fault or 'an unknown option ' .. option end
      if not find(given, pattern) then fault = fault or option .. ' has other values than it needs' end
      local most = bit == 64 and 2^52 or 2^51
      for place = 1, #value, 7 do
        if unpacked('<I7', value, place) > most then fault = fault or option .. ' is out of range' end
      end
      if bit == 8 and tonumber(given) == 0 then fault = fault or 'block is out of range' end
      bits, values[bit] = values[bit] and bits or bits + bit, value
    end
    return bits, values
  end

  -- One cost, or with commas one for each limit.
  local function costs_of(limit_count)
    local costs, given = {}, ARGV[at] or ''
    -- What one limit can never have is a cost all the same.
    if not (several and find(given, ',', 1, true)) then
      return { math.min(number('cost', 0, several and 2^53 or 2^1023), 2^53) }
    end
    at = at + 1
    for cost in string.gmatch(given, '[^,]+') do
      local value = tonumber(cost) or -1
      if value < 0 or value > 2^53 or value % 1 ~= 0 then fault = fault or 'cost is out of range' end
      costs[#costs + 1] = value
    end
    if #costs ~= limit_count then fault = fault or 'expected one cost, or one for each limit' end
    return costs
  end

  function to_shape()
    local operations = { acquire = 128, reserve = 129, ['at-most'] = 130, peek = 131, inspect = 132, refund = 133,
      penalty = 134, block = 135, settle = 136, cancel = 137, renew = 138, release = 139, reset = 140 }
    for first_byte, algorithm in pairs(ALGORITHMS) do
      named[algorithm.name], numbers_of[algorithm], only = algorithm, first_byte, algorithm
    end
    several = named[ARGV[1] or '']
    if not several and next(ALGORITHMS, (next(ALGORITHMS))) then
      return 'BADARG tollgate: expected of each limit its name and its own arguments, then id_ttl, cost, mode, now_us'
    end
    local limit_count, id_ttl = 0, 0
    shape = ''
    repeat
      if several then only, at = named[ARGV[at]], at + 1 end
      shape, limit_count = shape .. numbers(only), limit_count + 1
    until fault or not several or not named[ARGV[at] or '']
    if several then id_ttl = number('id_ttl', 0, 2^52) end
    local costs, mode = costs_of(limit_count), ARGV[at]
    local operation = operations[string.match(mode or '', '^[^+]*')]
    if not operation then fault = fault or mode and 'an unknown mode' or 'missing mode' end
    local bits, values = options_of(mode or '', limit_count)
    at = at + 1
    number('now_us', -1, 2^52)
    if ARGV[at] then fault = fault or 'more than these' end
    for index, key in ipairs(keys) do
      for other = 1, index - 1 do if keys[other] == key then fault = fault or 'two of KEYS are alike' end end
    end
    if #keys ~= limit_count + (id_ttl > 0 and 1 or 0) then fault = fault or #keys .. ' KEYS' end
    if not fault and operation == 135 and costs[1] > 2^51 then fault = 'cost is out of range' end
    if fault then
      local expected = several and 'of each limit its name and its own arguments, then id_ttl' or only.arguments
      return string.format('BADARG %s: expected %s, cost, mode, now_us; %s', several and 'tollgate' or only.name,
        expected, (string.gsub(fault, '[^ -~]', '?')))
    end
    if id_ttl > 0 then bits, values[32] = bits + 32, pack('<I7', id_ttl) end
    shape = shape .. pack('<BBI7', operation, bits, costs[1]) .. (values[8] or '') .. (values[16] or '')
      .. (values[32] or '') .. (values[64] or '')
    if costs[2] then each = pack('<I3', 1) .. pack('<' .. string.rep('I7', #costs), unpack(costs)) end
  end
end
