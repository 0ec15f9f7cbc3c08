-- Checks that the store accepts writes of this user, and returns its eviction policy if it says so. Changes nothing: the
-- key never exists.
--
-- KEYS  a key of the partition that no other script uses

redis.call('PEXPIRE', KEYS[1], 0)
local info = redis.pcall('INFO', 'memory')
return type(info) == 'string' and string.match(info, 'maxmemory_policy:([%w-]+)') or ''
