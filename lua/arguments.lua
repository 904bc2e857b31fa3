-- The arguments: what every script reads first, in either form, and the time. The script NAME is the text of this file,
-- of lua/NAME.lua and of lua/frame.lua.
-- Contract 1: lua/README.md says what that promises.
--
-- KEYS
--   KEYS[1]  the limit's state; packed, up to 7999 keys, as many as Lua unpacks, each
--            decided by itself; otherwise further keys are ignored
--
-- ARGV
--   the algorithm's own arguments, which its file lists, and then
--   cost    units  0 ..  0 takes nothing; of a block, its length in us, up to 2^51, 0 to lift it
--   mode    -      acquire | peek | at-most | refund | penalty | block | reset | inspect; reserve where its file says
--                  so; and options: +as-is or +reset, +overage, +block=us with 1 .. 2^51 us,
--                  +within=us with 0 .. 2^51 us
--   now_us  us     0 .. 2^52, or -1 for the server's time
--   packed (fewer than four arguments): an acquire for each of the keys, with less work for the server:
--   [1] numbers  by struct's format in the algorithm's file: its layout, its own arguments, the cost
--   [2] now_us   us     the server's time unless given
--   [3] several  needed if keys differ in cost or number of calls, or if one occurs twice: for each key, struct's I7I3,
--                its cost and its calls, of which as many are allowed as fit one after the other. Without it, a key
--                that occurs twice admits more than the limit

-- `a` to `e` are the algorithm's own arguments, as its file lists them; the first is the limit. An argument that is
-- missing or no number is `nan`, which is in no range. A packed call is an acquire; its file unpacks its numbers.
local packed, key_count, nan = #ARGV < 4 and ARGV[1], #KEYS, 0 / 0
local a, b, c, d, e, cost, mode, at_us = nan, nan, nan, nan, nan, nan, 'acquire', -1
-- Packed: the numbers' layout, each key's cost and calls in so many bytes, and which keys occurred earlier.
local layout, several, EACH, repeated = nil, nil, 10, nil
if packed then
  if ARGV[2] then at_us = tonumber(ARGV[2]) or nan end
  several = ARGV[3]
  if several then
    local seen = {}
    repeated = {}
    for index, key in ipairs(KEYS) do
      repeated[index], seen[key] = seen[key], true
    end
  end
else
  local number, at, first, second, third, fourth, fifth = tonumber, #ARGV - 2, unpack(ARGV, 1, 5)
  a, b, c = number(first) or nan, number(second) or nan, number(third) or nan
  d, e, cost = number(fourth) or nan, number(fifth) or nan, number(ARGV[at]) or nan
  mode, at_us = ARGV[at + 1], number(ARGV[at + 2]) or nan
  if key_count > 1 then key_count = 1 end
end

local now_us = at_us
if at_us == -1 then
  local clock = redis.call('TIME')
  now_us = clock[1] * 1000000 + clock[2]
end
-- The fast path of the algorithm's file: most calls find a state under their numbers, and overwrite it in place, are
-- denied, or only look. It does the arithmetic of the file's functions in fewer steps, and before any is defined: a
-- definition costs as much as ten steps. Whether it may decide, and what it has read and answered so far.
local peeks, gives, forced, most_of = mode == 'peek', mode == 'refund', mode == 'penalty', mode == 'at-most'
local unusual, remembers = peeks or gives or forced or most_of, mode == 'acquire+remembered'
local fast = (unusual or remembers or mode == 'acquire') and at_us == -1 and key_count > 0 and key_count <= 7999
  and (not several or #several == EACH * key_count)
local state, states, answers, missed

-- Tells versions of a limit apart that have a state each, by the numbers in it.
local function version_of(numbers)
  local first, second, rest = struct.unpack('<I7I7I3', numbers, 2)
  return (first * 1000003 + second * 8191 + rest) % 2^53
end

-- The functions of the algorithm's file, which the frame calls: about one key's state at a time, which variables of the
-- file hold. Each file defines those that it needs, in this order, and all but concurrency those that are marked.
--   decide     concurrency: decides the whole call in the frame's place
--   window_of  calendar_window: since when denials are counted, and until when; nothing if now is in no window
--   read       sliding_window_log, whose state isn't read whole: reads a key. Returns whether it exists, whether it has
--              a tail, and the tail's numbers; nothing if it holds something else
-- * restore    takes up a state, as of now. Returns when the key's expiry is armed for, whether its numbers have
--              changed, how far its time lay ahead, what remains, and how long until it is as if never used; nothing if
--              it is none
--   under      where two versions are charged (token_bucket, fixed_window, sliding_window_counter): takes the
--              numbers of this state in place of the call's, or the call's again. Returns their longest reset, and the
--              most units at one instant
-- * wait       how long until these units can be taken, into so much debt
--   remaining_after_debt
--              fixed_window: what remains once no units are owed any more
-- * owed       how many of the units that were taken at some time, or which parts of them, are owed still
-- * move       takes units, or gives them back. Returns whether it did, what remains, and how long until it is as if
--              never used
--   taken      token_bucket, fixed_window: what `owed` asks for, of a call that has just been allowed
--   write      all but sliding_window_log: the bytes of the state before its expiry, those after it, and the latest
--              that it is kept until, if that isn't twice the longest reset
--   save       sliding_window_log: makes the writes. Returns false if the log is truncated
-- * inspect    what the mode of this name appends
local decide, window_of, read, restore, under, wait, remaining_after_debt, owed, move, taken, write, save, inspect
