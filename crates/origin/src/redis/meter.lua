-- What all scripts share: one meter, as `tidegate_core::origin::OriginMeter` has it. Every number is whole and below 2^53,
-- where a double is exact. Numbers travel and are kept as doubles of eight bytes, low byte first: to read and write them as
-- text took most of a call's time.
--
-- A meter's field `t` has its terms, with those of other regions behind them if there are any. Its field `m` has its numbers,
-- and behind them what it keeps because other regions count it too; `x` what was charged for each component of theirs.

local LEVEL_MAX = 1125899906842624
local TOTAL_MAX = 4503599627370496
local NEVER_US = 4503599627370496
local RETAINED_US_MAX = 562949953421312
local GRANT_US_MAX = 10925000
local RETENTION_US = 60000000
local INDEX_EXTRA_US = 1000000
local CONNECTED_US_MAX = 60000000
local DIRTY_RETENTION_US = 604800000000
local DIRTY_METERS_MAX = 16384
local TOTALS_MAX = 2251799813685248
local SHARES = 1048576

local GCRA = 0
-- What a meter counts on: the whole, its standing part, or that while others hear of what was charged to it.
local CONNECTED, ISOLATED, SETTLING = 0, 2, 6
-- A key's expiry and a score are told to the store as text; `..` would round them.
local NUMBER = '%.0f'
local TERMS, TERMS_BYTES = '<dddddddd', 64
local CROSS_REGION, CROSS_REGION_AT = '<ddddd', 65
local METER, METER_BYTES = '<dddddddddddddddddc16', 152
local REGION_STATE, REGION_STATE_AT = '<dddddddddddd', 153
local CONNECTIVITY = '<dddd'
local NOBODY = '----------------'

local format, match, sub = string.format, string.match, string.sub
local floor, min, max = math.floor, math.min, math.max
local pack, read = struct.pack, struct.unpack
local call = redis.call
local unpack = table.unpack or unpack

local function div(a, b) return floor(a / b) end
local function div_up(a, b) return floor((a + b - 1) / b) end
local function less(a, b)
  if a > b then return a - b end
  return 0
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- Terms

local parsed = {}

-- The terms of a limit that is counted together with other regions are those of one that is not, and five numbers.
local function parse_terms(text)
  local kind, amount, period, tick, burst, tolerance, counted, version = read(TERMS, text)
  -- Nothing may be held of a limit of 0.
  local capacity = amount == 0 and 0 or burst
  local terms = {
    kind = kind, amount = amount, period = period, tick = tick, burst = burst, capacity = capacity,
    tolerance = tolerance, counted = counted == 1, version = version, units_max = div(LEVEL_MAX, period), full = capacity * period,
    cross_region = false,
  }
  if #text > TERMS_BYTES then
    local publish_threshold, share_amount, share_capacity, debt_max, share = read(CROSS_REGION, text, CROSS_REGION_AT)
    terms.cross_region = {
      publish_threshold = publish_threshold, amount = share_amount, capacity = share_capacity, debt_max = debt_max, share = share,
    }
  end
  parsed[text] = terms
  return terms
end

-- Most meters of a call are under few limits. What is in force is the whole, unless it is the standing part.
local function set_terms(meter, text)
  meter.terms = text
  local terms = parsed[text] or parse_terms(text)
  meter.kind, meter.amount, meter.period, meter.tick = terms.kind, terms.amount, terms.period, terms.tick
  meter.burst, meter.capacity, meter.counted = terms.burst, terms.capacity, terms.counted
  meter.tolerance = terms.tolerance
  meter.version, meter.units_max, meter.full = terms.version, terms.units_max, terms.full
  meter.cross_region, meter.rate, meter.most, meter.room_max = terms.cross_region, terms.amount, terms.capacity, terms.full
end

local function drops(meter, units) return min(units, meter.units_max) * meter.period end

local function ticks_us(meter, ticks, most_us)
  if ticks < div(most_us, meter.tick) then return ticks * meter.tick end
  return most_us
end

local function ticks_to_drain(meter, amount)
  if meter.amount == 0 then return 0 end
  return div_up(amount, meter.amount)
end

-- Tanks: what was charged and is not over. A meter is one, and has two more if other regions count it too.

local function pour(meter, tank, units, cell)
  if meter.kind == GCRA then
    tank.level = min(tank.level + drops(meter, units), LEVEL_MAX)
  elseif cell == meter.cell then
    tank.current = min(tank.current + units, meter.units_max)
  elseif cell + 1 == meter.cell then
    tank.previous = min(tank.previous + units, meter.units_max)
  end
end

local function milliseconds(us) return format(NUMBER, div_up(us, 1000)) end

-- What only limits of several regions need. To make functions takes time, so they are made only where there are such limits.

local connectivity_key, dirty_key, isolated_key, stamp, marked, isolated_meters = false, false, false, 0, false, false
local connectivity, connected_since_us, settled = ISOLATED, 0, 0
local turn, drain, tank_units, add, empty_tank, new_region_state, read_region_state, pack_region_state, set_force, begin, tell, stand_on,
  regard, come_to, connected_flag, shared, used, isolated_ticks, ticks_owned, read_connectivity, save_connectivity, name_of, mark_dirty_if_due, note_isolated,
  save_dirty

if IS_CROSS_REGION then
  turn = function(tank, from, to)
    if to == from + 1 then
      tank.previous, tank.current = tank.current, 0
    elseif to > from then
      tank.previous, tank.current = 0, 0
    end
  end

  drain = function(tank, ticks, amount)
    if amount > 0 then tank.level = less(tank.level, min(ticks, div_up(tank.level, amount)) * amount) end
  end

  tank_units = function(meter, tank)
    if meter.kind == GCRA then return div_up(tank.level, meter.period) end
    return tank.current + tank.previous
  end

  add = function(meter, tank, other)
    tank.level = min(tank.level + other.level, LEVEL_MAX)
    tank.current = min(tank.current + other.current, meter.units_max)
    tank.previous = min(tank.previous + other.previous, meter.units_max)
  end

  empty_tank = function() return { level = 0, current = 0, previous = 0 } end

  new_region_state = function(incarnation)
    return {
      incarnation = incarnation, charged = 0, refunded = 0, published = 0, own = empty_tank(), isolated = empty_tank(),
      is_open = false, connectivity = CONNECTED, forgiven = 0,
    }
  end

  read_region_state = function(text)
    local incarnation, charged, refunded, published, level, current, previous, isolated_level, isolated_current, isolated_previous,
      flags, forgiven = read(REGION_STATE, text, REGION_STATE_AT)
    return {
      incarnation = incarnation, charged = charged, refunded = refunded, published = published,
      own = { level = level, current = current, previous = previous },
      isolated = { level = isolated_level, current = isolated_current, previous = isolated_previous },
      is_open = flags % 2 == 1, connectivity = flags - flags % 2, forgiven = forgiven,
    }
  end

  pack_region_state = function(out)
    local own, isolated = out.own, out.isolated
    local flags = (out.is_open and 1 or 0) + out.connectivity
    return pack(REGION_STATE, out.incarnation, out.charged, out.refunded, out.published, own.level, own.current, own.previous,
      isolated.level, isolated.current, isolated.previous, flags, out.forgiven)
  end

  set_force = function(meter)
    local out, cross_region = meter.out, meter.cross_region
    if out and out.connectivity ~= CONNECTED then
      meter.rate, meter.most, meter.room_max = cross_region.amount, cross_region.capacity, cross_region.capacity * meter.period
    else
      meter.rate, meter.most, meter.room_max = meter.amount, meter.capacity, meter.full
    end
  end

  -- Sums begin anew, with what is given as all that counts.
  begin = function(meter, at_us, own)
    local out = meter.out
    out.incarnation = max(at_us, out.incarnation + 1)
    out.charged, out.refunded, out.published, out.own = tank_units(meter, own), 0, 0, own
  end

  -- Adds to what others are to hear of.
  tell = function(meter, units)
    local out = meter.out
    out.charged = out.charged + units
    if out.charged >= TOTALS_MAX then begin(meter, meter.at * meter.tick, out.own) end
  end

  -- Others hear of what is left of what was charged to the part; and what they have heard of counts as what all used.
  stand_on = function(meter, to)
    local out = meter.out
    if not out then return end
    local from = out.connectivity
    if from == ISOLATED and to ~= ISOLATED then
      local own, isolated = out.own, out.isolated
      own.current = min(own.current + isolated.current, meter.units_max)
      own.previous = min(own.previous + isolated.previous, meter.units_max)
      tell(meter, tank_units(meter, isolated))
    end
    if from ~= to and (from == SETTLING or from == ISOLATED and to == CONNECTED) then
      add(meter, meter, out.isolated)
      meter.level = max(meter.level, out.own.level)
      out.isolated = empty_tank()
    end
    out.connectivity = to
    set_force(meter)
  end

  connected_flag = function(meter) return meter.out and meter.out.connectivity == CONNECTED and 8 or 0 end

  shared = function(whole, share)
    return div(whole, SHARES) * share + div_up(whole % SHARES * share, SHARES)
  end

  -- What is charged of the limit in force: of the standing part, this region's share of what all used counts too.
  used = function(meter, of)
    local out = meter.out
    if not out or out.connectivity == CONNECTED then return meter[of] end
    local most = of == 'level' and LEVEL_MAX or meter.units_max
    return min(shared(meter[of], meter.cross_region.share) + out.isolated[of], most)
  end

  -- What is held may yet be charged there.
  isolated_ticks = function(meter, held)
    if not meter.out then return 0 end
    local amount = meter.cross_region.amount
    if amount == 0 then amount = max(meter.amount, 1) end
    return div_up(meter.out.isolated.level + held, amount)
  end

  ticks_owned = function(meter, held)
    if not meter.out then return 0 end
    return div_up(meter.out.own.level + held, max(meter.cross_region.amount, 1))
  end

  -- Marks: the meters that other regions may not have heard of; until when all regions count as heard of, since when, and whether
  -- what they charged to their standing parts has come since.

  read_connectivity = function(text)
    local until_us = 0
    if text then until_us, stamp, connected_since_us, settled = read(CONNECTIVITY, text) end
    connectivity = CONNECTED
    if until_us <= now or until_us > now + CONNECTED_US_MAX then
      connectivity = ISOLATED
    elseif settled == 0 then
      connectivity = SETTLING
    end
    return until_us
  end

  save_connectivity = function(until_us)
    local text = pack(CONNECTIVITY, until_us, stamp, connected_since_us, settled)
    call('SET', connectivity_key, text, 'PX', milliseconds(2 * DIRTY_RETENTION_US))
  end

  -- A name is the key without what all keys of meters begin with, which is as long as the first key and one more.
  name_of = function(meter) return sub(meter.key, #KEYS[1] + 2) end

  mark_dirty_if_due = function(meter)
    local out = meter.out
    if not out then return end
    local total = out.charged + out.refunded
    if total - out.published < (out.is_open and 1 or meter.cross_region.publish_threshold) then return end
    out.published, out.is_open = total, true
    stamp = max(now, stamp + 1)
    marked = marked or {}
    marked[#marked + 1] = format(NUMBER, stamp)
    marked[#marked + 1] = name_of(meter)
  end

  -- What was charged to the standing part is told when all regions are heard of again.
  note_isolated = function(meter)
    local out = meter.out
    if not out then return end
    local isolated = out.isolated
    if out.connectivity ~= ISOLATED or isolated.level + isolated.current + isolated.previous == 0 then return end
    isolated_meters = isolated_meters or {}
    isolated_meters[#isolated_meters + 1] = format(NUMBER, now)
    isolated_meters[#isolated_meters + 1] = name_of(meter)
  end

  save_dirty = function(until_us)
    if isolated_meters then
      call('ZADD', isolated_key, unpack(isolated_meters))
      call('PEXPIRE', isolated_key, milliseconds(2 * DIRTY_RETENTION_US))
    end
    if not marked then return end
    call('ZADD', dirty_key, unpack(marked))
    call('PEXPIRE', dirty_key, milliseconds(2 * DIRTY_RETENTION_US))
    save_connectivity(until_us)
  end
end

-- One meter

local function new_meter(place, terms)
  local meter = {
    key = KEYS[place], ends = KEYS[place + 1], gone = false, shortened = false, is_new = true, is_held = false,
    had_own = false, own = false, wanted = false, level = 0, at = 0, cell = 0, current = 0, previous = 0, held = 0,
    held_before = 0, wants = 0, charged = 0, refunded = 0, loss = 0, others = 0, ends_us = 0, latest_us = 0, first_us = NEVER_US,
    terms = '', kind = 0, amount = 0, period = 0, tick = 0, burst = 0, capacity = 0, tolerance = 0, counted = false,
    version = 0, units_max = 0, full = 0, cross_region = false, rate = 0, most = 0, room_max = 0, out = false,
  }
  set_terms(meter, terms)
  meter.at = div(now, meter.tick)
  meter.cell = div(meter.at, meter.period)
  if IS_CROSS_REGION and meter.cross_region then meter.out = new_region_state(now) end
  return meter
end

-- All fields are named where the table is made: one that grows is laid out anew again and again.
local function load_meter(place, terms, field)
  local found = call('HMGET', KEYS[place], 't', 'm', field)
  local kept = found[2]
  if not kept then return terms and new_meter(place, terms) end
  local level, at, cell, current, previous, held, held_before, wants, charged, refunded, loss, others, ends_us, latest_us,
    first_us, units, until_us, whose = read(METER, kept)
  local meter = {
    key = KEYS[place], ends = KEYS[place + 1], gone = false, shortened = false, is_new = false, is_held = others > 0,
    had_own = false, own = false, wanted = false, level = level, at = at, cell = cell, current = current,
    previous = previous, held = held, held_before = held_before, wants = wants, charged = charged, refunded = refunded, loss = loss,
    others = others, ends_us = ends_us, latest_us = latest_us, first_us = first_us,
    terms = '', kind = 0, amount = 0, period = 0, tick = 0, burst = 0, capacity = 0, tolerance = 0, counted = false,
    version = 0, units_max = 0, full = 0, cross_region = false, rate = 0, most = 0, room_max = 0, out = false,
  }
  set_terms(meter, found[1])
  if #kept > METER_BYTES then
    meter.out = true
    if IS_CROSS_REGION then
      meter.out = read_region_state(kept)
      set_force(meter)
    end
  end
  if until_us > 0 then meter.wanted = { node = whose, units = units, until_us = until_us } end
  return meter, found[3]
end

local function holders(meter) return meter.others + (meter.own and 1 or 0) end

local function roll_cells(meter, cell)
  if cell == meter.cell then return end
  local out = meter.out
  if cell == meter.cell + 1 then
    meter.previous, meter.current = meter.current, 0
  elseif cell > meter.cell then
    meter.previous, meter.current = 0, 0
  end
  if IS_CROSS_REGION and out then
    turn(out.own, meter.cell, cell)
    turn(out.isolated, meter.cell, cell)
  end
  meter.held, meter.held_before = 0, meter.held + meter.held_before
  meter.cell = cell
end

-- What was charged to the standing part drains after what all regions used has; what this region charged is paid off by its
-- own part of the rate.
local function roll(meter)
  local tick = div(now, meter.tick)
  local elapsed = less(tick, meter.at)
  meter.at = tick
  if meter.kind ~= GCRA then return roll_cells(meter, div(tick, meter.period)) end
  local out, ticks = meter.out, ticks_to_drain(meter, meter.level)
  if IS_CROSS_REGION and out then
    drain(out.isolated, less(elapsed, ticks), meter.cross_region.amount)
    drain(out.own, elapsed, meter.cross_region.amount)
  end
  meter.level = less(meter.level, min(elapsed, ticks) * meter.amount)
end

-- What this region charged counts as soon as all are heard of again; while they are, nothing of it is left that has drained.
if IS_CROSS_REGION then
  regard = function(meter, before)
    stand_on(meter, connectivity)
    local out = meter.out
    if not out or out.connectivity ~= CONNECTED then return end
    if div(connected_since_us, meter.tick) > before then
      meter.level = max(meter.level, out.own.level)
    else
      out.own.level = min(out.own.level, meter.level)
    end
  end

  come_to = function(meter)
    local before = meter.at
    roll(meter)
    regard(meter, before)
  end
end

local function kept_us(meter)
  local ticks = 2 * meter.period
  if meter.kind == GCRA then
    local held = drops(meter, meter.held + meter.held_before)
    ticks = ticks_to_drain(meter, meter.level + held)
    if IS_CROSS_REGION then ticks = max(ticks + isolated_ticks(meter, held), ticks_owned(meter, held)) end
  end
  return ticks_us(meter, ticks, RETAINED_US_MAX) + GRANT_US_MAX + RETENTION_US
end

-- A key is kept a little longer than it has to be, so that not every call has to say for how long.
local function pack_meter(meter, us)
  local expires = now + us > meter.ends_us
  if expires then meter.ends_us = now + us + div(us, 8) end
  local wanted = meter.wanted
  local kept = pack(METER, meter.level, meter.at, meter.cell, meter.current, meter.previous, meter.held,
    meter.held_before, meter.wants, meter.charged, meter.refunded, meter.loss, holders(meter), meter.ends_us, meter.latest_us,
    meter.first_us, wanted and wanted.units or 0, wanted and wanted.until_us or 0, wanted and wanted.node or NOBODY)
  if IS_CROSS_REGION and meter.out then kept = kept .. pack_region_state(meter.out) end
  return kept, expires
end

-- The index is made anew with the first holder, and outlives what it is an index of: a grant that is not in it would
-- never lapse.
local function expire(meter, expires)
  if expires then call('PEXPIRE', meter.key, milliseconds(meter.ends_us - now)) end
  if holders(meter) > 0 and (expires or not meter.is_held) then
    call('PEXPIRE', meter.ends, milliseconds(meter.ends_us - now + INDEX_EXTRA_US))
  end
end

