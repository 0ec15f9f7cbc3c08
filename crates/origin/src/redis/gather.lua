-- What `tidegate_core::origin::OriginMeter` tells other regions: for each meter its terms, the incarnation of its sums, and
-- those; nothing for one that is gone, or is of one region.
--
-- KEYS  until when all regions count as heard of, and the meters

local COMPONENT = '<dddd'

read_whole(call('MGET', KEYS[1])[1])

-- What is left of what this region charged.
local function owned(meter, out)
  local elapsed = less(div(now, meter.tick), meter.at)
  drain(out.own, elapsed, meter.abroad.amount)
  local is_whole = out.ground == ON_WHOLE and ground == ON_WHOLE
  if is_whole and div(whole_since_us, meter.tick) <= meter.at then
    drain(meter, elapsed, meter.amount)
    out.own.level = min(out.own.level, meter.level)
  end
  return tank_units(meter, out.own)
end

local answer = {}
for place = 2, #KEYS do
  local meter = load_meter(place, false, 't')
  local out, sums = meter and meter.out, ''
  if out and meter.kind == GCRA then
    sums = meter.terms .. pack(COMPONENT, out.incarnation, out.charged, out.refunded, owned(meter, out))
  elseif out then
    sums = meter.terms .. pack(COMPONENT, out.incarnation, meter.cell, out.own.current, out.own.previous)
  end
  answer[place - 1] = sums
end
return answer
