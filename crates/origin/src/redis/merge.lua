-- The transition of `tidegate_core::origin::Partition::merge`, step by step: what is new in another region's components is
-- charged, without a test.
--
-- KEYS  until when all regions count as heard of, and the marks; for each meter its own and that of its holders
-- ARGV  the region; then of each meter the terms that it knows, the incarnation of its sums, and those

local COMPONENT, COMPONENT_BYTES = '<c104dddd', 136
local SEEN, SEEN_BYTES = '<c16dddd', 48
local MERGED = '<ddd'
local INCARNATIONS_MAX = 2
local VERSION_AT = 57

local from, numbers = ARGV[1], ARGV[2]
connectivity_key, dirty_key = KEYS[1], KEYS[2]
local connected_until_us = read_connectivity(call('MGET', connectivity_key)[1])

local function read_seen(text)
  local seen = {}
  for at = 1, text and #text or 0, SEEN_BYTES do
    local region, incarnation, first, second, third = read(SEEN, text, at)
    seen[#seen + 1] = { region = region, incarnation = incarnation, first = first, second = second, third = third }
  end
  return seen
end

local function pack_seen(seen)
  local texts = {}
  for i, entry in ipairs(seen) do
    texts[i] = pack(SEEN, entry.region, entry.incarnation, entry.first, entry.second, entry.third)
  end
  return table.concat(texts)
end

-- What is remembered of a component, and whether anything was. Of two other incarnations the lower makes room.
local function entry_of(seen, incarnation)
  local others, lowest = 0, 0
  for i, entry in ipairs(seen) do
    if entry.region == from then
      if entry.incarnation == incarnation then return entry, true end
      others = others + 1
      if lowest == 0 or entry.incarnation < seen[lowest].incarnation then lowest = i end
    end
  end
  if others >= INCARNATIONS_MAX then table.remove(seen, lowest) end
  local entry = { region = from, incarnation = incarnation, first = 0, second = 0, third = 0 }
  seen[#seen + 1] = entry
  return entry, false
end

-- Whoever here calls for the meter says what this region's part is, whichever version of the limit it knows.
local function unversioned(terms) return sub(terms, 1, VERSION_AT - 1) .. pack('<d', 0) .. sub(terms, VERSION_AT + 8) end

local function charge_foreign(meter, units, cell)
  local level, current, previous = meter.level, meter.current, meter.previous
  pour(meter, meter, min(units, LEVEL_MAX), cell)
  if meter.counted then return end
  local owed = meter.cross_region.debt_max
  local debt = min(meter.full + drops(meter, owed), LEVEL_MAX)
  local most = min(meter.capacity + owed, meter.units_max)
  local over = less(meter.level, max(level, debt))
  local over_current, over_previous = less(meter.current, max(current, most)), less(meter.previous, max(previous, most))
  meter.level, meter.current = meter.level - over, meter.current - over_current
  meter.previous = meter.previous - over_previous
  local forgiven = div_up(over, meter.period) + over_current + over_previous
  meter.out.forgiven = min(meter.out.forgiven + forgiven, TOTAL_MAX)
end

local function take_drained(meter, entry, is_known, charged, refunded, level)
  local more, back = min(charged, level), 0
  if is_known then more, back = less(charged, entry.first), less(refunded, entry.second) end
  entry.first, entry.second = max(entry.first, charged), max(entry.second, refunded)
  charge_foreign(meter, more, 0)
  meter.level = less(meter.level, drops(meter, back))
  return more, more + back > 0
end

local function known_of(entry, cell)
  if cell > entry.first then return 0 end
  if cell == entry.first then return entry.second end
  if cell + 1 == entry.first then return entry.third end
  return NEVER_US
end

-- What is of a cell that has not begun here counts in the one that has.
local function take_cell(meter, cell, units)
  cell = min(cell, meter.cell)
  if cell + 1 < meter.cell then return 0 end
  charge_foreign(meter, units, cell)
  return units
end

local function remember_cells(entry, cell, current, previous)
  local known, now_known, before = entry.first, entry.second, entry.third
  if cell > known + 1 then
    entry.first, entry.second, entry.third = cell, current, previous
  elseif cell == known + 1 then
    entry.first, entry.second, entry.third = cell, current, max(previous, now_known)
  elseif cell == known then
    entry.second, entry.third = max(current, now_known), max(previous, before)
  elseif cell + 1 == known then
    entry.third = max(before, current)
  end
end

local function take_cells(meter, entry, is_known, cell, current, previous)
  local cell_before = less(cell, 1)
  local more, more_before = current, previous
  if is_known then
    more, more_before = less(current, known_of(entry, cell)), less(previous, known_of(entry, cell_before))
    remember_cells(entry, cell, current, previous)
  else
    entry.first, entry.second, entry.third = cell, current, previous
  end
  local charged = take_cell(meter, cell, more) + take_cell(meter, cell_before, more_before)
  return charged, charged > 0
end

local function counts_like(meter, terms)
  local other = parsed[terms] or parse_terms(terms)
  if not meter.out or meter.kind ~= other.kind then return false end
  return meter.kind == GCRA or meter.period * meter.tick == other.period * other.tick
end

local charged_in_all, stale = 0, 0
local changed = {}
for i = 1, #numbers / COMPONENT_BYTES do
  local terms, incarnation, first, second, third = read(COMPONENT, numbers, 1 + (i - 1) * COMPONENT_BYTES)
  local place, charged, is_new = 1 + 2 * i, 0, false
  local meter, known = load_meter(place, unversioned(terms), 'x')
  if counts_like(meter, terms) then
    come_to(meter)
    meter.out.is_open = true
    local seen = read_seen(known)
    local entry, is_known = entry_of(seen, incarnation)
    local take = meter.kind == GCRA and take_drained or take_cells
    charged, is_new = take(meter, entry, is_known, first, second, third)
    mark_dirty_if_due(meter)
    changed[#changed + 1] = { meter = meter, seen = pack_seen(seen) }
  end
  charged_in_all = min(charged_in_all + charged, TOTAL_MAX)
  if not is_new then stale = stale + 1 end
end

for _, change in ipairs(changed) do
  local meter = change.meter
  local kept, expires = pack_meter(meter, kept_us(meter))
  if meter.is_new then
    call('HSET', meter.key, 'm', kept, 'x', change.seen, 't', meter.terms)
  else
    call('HSET', meter.key, 'm', kept, 'x', change.seen)
  end
  expire(meter, expires)
end
save_dirty(connected_until_us)
return pack(MERGED, now, charged_in_all, stale)
