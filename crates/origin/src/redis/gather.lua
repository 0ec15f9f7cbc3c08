-- What `tidegate_core::origin::OriginMeter` tells other regions: for each meter its terms, the incarnation of its sums, and
-- those; nothing for one that is gone, or is of one region.
--
-- KEYS  until when all regions count as heard of, and the meters

local COMPONENT = '<dddd'

read_connectivity(call('MGET', KEYS[1])[1])

-- What is left of what this region charged.
local function owned(meter, out)
  local elapsed = less(div(now, meter.tick), meter.at)
  drain(out.own, elapsed, meter.cross_region.amount)
  local is_connected = out.connectivity == CONNECTED and connectivity == CONNECTED
  if is_connected and div(connected_since_us, meter.tick) <= meter.at then
    drain(meter, elapsed, meter.amount)
    out.own.level = min(out.own.level, meter.level)
  end
  return tank_units(meter, out.own)
end

local answer = {}
for place = 2, #KEYS do
  local meter = load_meter(place, false, 't')
  local out, totals = meter and meter.out, ''
  if out and meter.kind == GCRA then
    totals = meter.terms .. pack(COMPONENT, out.incarnation, out.charged, out.refunded, owned(meter, out))
  elseif out then
    totals = meter.terms .. pack(COMPONENT, out.incarnation, meter.cell, out.own.current, out.own.previous)
  end
  answer[place - 1] = totals
end
return answer
