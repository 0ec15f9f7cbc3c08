-- What only one courier of a region has, as long as it says so in time.
--
-- KEYS  who has it
-- ARGV  who asks, and for how many milliseconds; 0 to give it up

local has = redis.call('MGET', KEYS[1])[1]
if has and has ~= ARGV[1] then return '0' end
if ARGV[2] == '0' then
  redis.call('PEXPIRE', KEYS[1], 0)
  return '0'
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return '1'
