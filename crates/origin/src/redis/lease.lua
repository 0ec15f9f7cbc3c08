-- What only one replicator of a region has, as long as it says so in time; and how late other regions hear of this one, which only
-- whoever has it can measure, and all of the region have to know.
--
-- KEYS  who has it, and how late others hear of this region, in microseconds
-- ARGV  who asks, and for how many milliseconds, 0 to give it up; how late others hear, if it is that one's to say
-- Answers whether who asks has it, and how late others hear.

local text = redis.call('MGET', KEYS[1])[1]
local has, late = nil, '0'
if text then has, late = string.match(text, '^(%x+) ?(%d*)$') end
if has and has ~= ARGV[1] then return '0 ' .. (late == '' and '0' or late) end
if ARGV[2] == '0' then
  redis.call('PEXPIRE', KEYS[1], 0)
  return '0 0'
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[3], 'PX', ARGV[2])
return '1 ' .. ARGV[3]
