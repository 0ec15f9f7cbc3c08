-- What `tidegate_core::origin::Partition::round` does with marks. Their meters are read with `gather.lua`, by keys that are
-- only known then.
--
-- KEYS  until when all regions count as heard of, the marks, and the meters of which something was charged to the standing part
-- ARGV  for how long they do, whether all that they charged has come, and from when on; the mark up to which all have everything, the one after which to gather, how many

local ROUND, GATHERED = '<dddddd', '<ddddd'
local AHEAD_US_MAX = 250000

connectivity_key, dirty_key, isolated_key = KEYS[1], KEYS[2], KEYS[3]
local connected_for_us, is_settled, clock_us, trim, after, most = read(ROUND, ARGV[1])
local before_us = read_connectivity(call('MGET', connectivity_key)[1])
-- A clock that was set back would make what was said before last longer; by a little, if it runs slower than the replicator's.
local ahead_us = less(clock_us, now)
if ahead_us > AHEAD_US_MAX or before_us > now + CONNECTED_US_MAX then before_us = 0 end
before_us = less(before_us, ahead_us)
if before_us <= now then settled = 0 end
local until_us = min(clock_us, now) + min(connected_for_us, CONNECTED_US_MAX)
local settles = is_settled == 1 and until_us > now
local connected_until_us = max(before_us, until_us)
-- Who counts on the whole goes on by what makes it one, and by nothing less; and begins to by that.
if settled == 1 and not settles then connected_until_us = before_us end
if settled == 0 and settles then connected_until_us, settled = until_us, 1 end
if before_us <= now or connected_since_us > now then connected_since_us = now end
-- Who remembers marks that were never made knew another life of this store.
if trim > stamp then trim = 0 end
if after > stamp then after = 0 end
trim = max(trim, less(now, DIRTY_RETENTION_US))
call('ZREMRANGEBYSCORE', dirty_key, '-inf', format(NUMBER, trim))
call('ZREMRANGEBYRANK', dirty_key, 0, -DIRTY_METERS_MAX - 1)
local first = '(' .. format(NUMBER, after)
local found = call('ZRANGEBYSCORE', dirty_key, first, '+inf', 'WITHSCORES', 'LIMIT', 0, format(NUMBER, most + 1))
local more = #found > 2 * most
local upto = stamp
if more then upto = found[2 * most] + 0 end
-- Those are for `join.lua` to mark, if all are heard of again.
call('ZREMRANGEBYSCORE', isolated_key, '-inf', format(NUMBER, less(now, DIRTY_RETENTION_US)))
call('ZREMRANGEBYRANK', isolated_key, 0, -DIRTY_METERS_MAX - 1)
local joined = {}
if connected_until_us > now then joined = call('ZRANGE', isolated_key, 0, most - 1) end
local answer = { pack(GATHERED, now, upto, (more or #joined > 0) and 1 or 0, connected_until_us > now and 1 or 0, #joined) }
for at = 1, min(#found, 2 * most), 2 do answer[#answer + 1] = found[at] end
for at = 1, #joined do answer[#answer + 1] = joined[at] end
save_connectivity(connected_until_us)
return answer
