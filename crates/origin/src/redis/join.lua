-- What `tidegate_core::origin::Partition::round` does with meters on whose parts something was spent while their region was apart:
-- they are marked, so that others hear of it.
--
-- KEYS  until when all regions count as heard of, the marks, those meters, and the store; for each meter its own and that of its
--       holders
-- ARGV  whether the store is a cluster

connectivity_key, dirty_key, isolated_key = KEYS[1], KEYS[2], KEYS[3]
local before = call('MGET', connectivity_key, KEYS[4])
local connected_until_us = read_connectivity(before[1])
-- They fell silent again meanwhile.
if connectivity == ISOLATED then return {} end
local store = load_store(before[2])
-- Of what may have been lost nothing is told under the name that it had: the next call gives it another.
local is_lost = took_over(store, ARGV[1] + 0)
for place = 5, #KEYS, 2 do
  local meter = load_meter(place, false, 't')
  if meter and meter.out and not is_lost and meter.loss == store.loss then
    come_to(meter)
    mark_dirty_if_due(meter)
    local kept, expires = pack_meter(meter, kept_us(meter))
    call('HSET', meter.key, 'm', kept)
    expire(meter, expires)
  end
  call('ZREM', isolated_key, sub(KEYS[place], #KEYS[1] + 2))
end
save_dirty(connected_until_us)
return {}
