-- The transition of `tidegate_core::origin::Partition::apply`, step by step: a test holds the two against each other on
-- random histories. Everything is read and decided before anything is written, so that a call is applied whole or not at
-- all. Every number is whole and below 2^53, where a double is exact. Numbers travel and are kept as doubles of eight bytes,
-- low byte first: to read and write them as text took most of a call's time.
--
-- KEYS  the store's own, the lane's, and for each meter its own and that of its holders by the end of their grants
-- ARGV  the node; then the numbers of the call: its sequence, the last that was acknowledged, whether the store is a
--       cluster, how many meters and asks there are; of each meter what the limit is and what is said; of each ask how
--       many wait, how many meters they have, and the place of each of them with what it costs there

local DEBT_MAX = 1125899906842624
local TOTAL_MAX = 4503599627370496
local NEVER_US = 4503599627370496
local DEBT_US_MAX = 562949953421312
local LAPSES_PER_CALL = 8
local LAPSE_MARGIN_US = 300000
local LIFE_US_MAX = 10000000
local HELD_US_MAX = 10925000
local RECALL_US = 300000
local RECALL_RETRY_US = 200000
local RETENTION_US = 60000000
local LANE_RETENTION_US = 3600000000
local INDEX_EXTRA_US = 1000000
-- How long the store is believed to be the one it was. Shorter: a promotion is noticed sooner; more work in each call.
local IDENTITY_US = 500000

local GCRA = 0
-- A key's expiry and a score are told to the store as text; `..` would round them.
local NUMBER = '%.0f'
local HEADER = '<ddddd'
local TERMS = '<dddddddd'
local UPDATE = '<c64ddddddd'
local ASK, CHARGE = '<dd', '<dd'
local HOLDING = '<ddd'
local METER = '<ddddddddddddddddc16'
local STORE, STORE_BYTES = '<ddd', 24
local LANE, LANE_BYTES = '<dd', 16
local REPLY, TOLD, DECIDED = '<dd', '<ddddddd', '<ddd'
local OUTDATED = -1
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

local node, numbers = ARGV[1], ARGV[2]
local sequence, acknowledged, clustered, updates, asks, at_byte = read(HEADER, numbers)

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- Terms

local parsed = {}

local function parse_terms(text)
  local kind, amount, period, tick, burst, capacity, counted, version = read(TERMS, text)
  local terms = {
    kind = kind, amount = amount, period = period, tick = tick, burst = burst, capacity = capacity,
    counted = counted == 1, version = version, units_max = div(DEBT_MAX, period), full = capacity * period,
  }
  parsed[text] = terms
  return terms
end

-- Most meters of a call are under few limits.
local function set_terms(meter, text)
  meter.terms = text
  local terms = parsed[text] or parse_terms(text)
  meter.kind, meter.amount, meter.period, meter.tick = terms.kind, terms.amount, terms.period, terms.tick
  meter.burst, meter.capacity, meter.counted = terms.burst, terms.capacity, terms.counted
  meter.version, meter.units_max, meter.full = terms.version, terms.units_max, terms.full
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

-- One meter

local function read_holding(text)
  local amount, until_us, cell = read(HOLDING, text)
  return { amount = amount, until_us = until_us, cell = cell }
end

-- All fields are named where the table is made: one that grows is laid out anew again and again.
local function new_meter(place, terms)
  local meter = {
    key = KEYS[place], ends = KEYS[place + 1], gone = false, shortened = false, is_new = true, is_held = false,
    had_own = false, own = false, wanted = false, level = 0, at = 0, cell = 0, current = 0, previous = 0, held = 0,
    held_before = 0, charged = 0, refunded = 0, loss = 0, others = 0, ends_us = 0, latest_us = 0, first_us = NEVER_US,
    terms = '', kind = 0, amount = 0, period = 0, tick = 0, burst = 0, capacity = 0, counted = false, version = 0,
    units_max = 0, full = 0,
  }
  set_terms(meter, terms)
  meter.at = div(now, meter.tick)
  meter.cell = div(meter.at, meter.period)
  return meter
end

local function load_meter(place, terms)
  local found = call('HMGET', KEYS[place], 't', 'm', node)
  if not found[2] then return new_meter(place, terms) end
  local level, at, cell, current, previous, held, held_before, charged, refunded, loss, others, ends_us, latest_us,
    first_us, units, until_us, whose = read(METER, found[2])
  local meter = {
    key = KEYS[place], ends = KEYS[place + 1], gone = false, shortened = false, is_new = false, is_held = others > 0,
    had_own = false, own = false, wanted = false, level = level, at = at, cell = cell, current = current,
    previous = previous, held = held, held_before = held_before, charged = charged, refunded = refunded, loss = loss,
    others = others, ends_us = ends_us, latest_us = latest_us, first_us = first_us,
    terms = '', kind = 0, amount = 0, period = 0, tick = 0, burst = 0, capacity = 0, counted = false, version = 0,
    units_max = 0, full = 0,
  }
  set_terms(meter, found[1])
  if until_us > 0 then meter.wanted = { node = whose, units = units, until_us = until_us } end
  if found[3] then
    meter.own = read_holding(found[3])
    meter.had_own = true
    meter.others = others - 1
  end
  return meter
end

local function holders(meter) return meter.others + (meter.own and 1 or 0) end

local function grant_cell(meter)
  if meter.kind == GCRA then return 0 end
  return meter.cell
end

local function free(meter, holding)
  local own, other = 'held_before', 'held'
  if holding.cell == grant_cell(meter) then own, other = other, own end
  local rest = less(holding.amount, meter[own])
  meter[own] = meter[own] - (holding.amount - rest)
  meter[other] = less(meter[other], rest)
end

local function release(meter)
  local holding = meter.own
  meter.own = false
  if holding then free(meter, holding) end
  return holding
end

local function hold(meter, holding)
  if holding.amount == 0 then return end
  local of = holding.cell == grant_cell(meter) and 'held' or 'held_before'
  meter[of] = meter[of] + holding.amount
  meter.own = holding
end

local function charge(meter, units, cell)
  meter.charged = min(meter.charged + units, TOTAL_MAX)
  if meter.kind == GCRA then
    meter.level = min(meter.level + drops(meter, units), DEBT_MAX)
  elseif cell == meter.cell then
    meter.current = min(meter.current + units, meter.units_max)
  elseif cell + 1 == meter.cell then
    meter.previous = min(meter.previous + units, meter.units_max)
  end
end

local function refund(meter, update)
  local units = update.refund
  meter.refunded = min(meter.refunded + units, TOTAL_MAX)
  if meter.kind == GCRA then
    local amount = drops(meter, units)
    local age = update.refund_of == 0 and 0 or less(meter.at, div(update.refund_of, meter.tick))
    local drained = min(age, ticks_to_drain(meter, amount)) * meter.amount
    meter.level = less(meter.level, less(amount, drained))
  elseif update.cell == meter.cell then
    meter.current = less(meter.current, units)
  elseif update.cell + 1 == meter.cell then
    meter.previous = less(meter.previous, units)
  end
end

local function recount(meter, kind)
  local units = meter.current + meter.previous
  if kind == GCRA then units = div_up(meter.level, meter.period) end
  units = min(units, meter.units_max)
  meter.cell, meter.previous = div(meter.at, meter.period), 0
  if meter.kind == GCRA then
    meter.level, meter.current = drops(meter, units), 0
  else
    meter.level, meter.current = 0, units
  end
  meter.held, meter.held_before = 0, meter.held + meter.held_before
end

local function adopt(meter, terms)
  if terms == meter.terms or (parsed[terms] or parse_terms(terms)).version < meter.version then return false end
  local kind, period, tick = meter.kind, meter.period, meter.tick
  set_terms(meter, terms)
  meter.is_new = true
  if period ~= meter.period then meter.level = drops(meter, div_up(meter.level, period)) end
  if tick ~= meter.tick then meter.at = div(meter.at * tick, meter.tick) end
  local both_gcra = kind == GCRA and meter.kind == GCRA
  if not both_gcra and (kind ~= meter.kind or period * tick ~= meter.period * meter.tick) then recount(meter, kind) end
  return true
end

local function roll_cells(meter, cell)
  if cell == meter.cell then return end
  if cell == meter.cell + 1 then
    meter.previous, meter.current = meter.current, 0
  elseif cell > meter.cell then
    meter.previous, meter.current = 0, 0
  end
  meter.held, meter.held_before = 0, meter.held + meter.held_before
  meter.cell = cell
end

local function roll(meter)
  local tick = div(now, meter.tick)
  local elapsed = less(tick, meter.at)
  meter.at = tick
  if meter.kind == GCRA then
    local drained = min(elapsed, ticks_to_drain(meter, meter.level)) * meter.amount
    meter.level = less(meter.level, drained)
  else
    roll_cells(meter, div(tick, meter.period))
  end
end

local function distrust(meter, loss, changed)
  local known = meter.loss == loss
  meter.loss = loss
  if loss == 0 or (known and not changed) or not meter.counted then return end
  local tick = div(loss, meter.tick)
  if meter.kind == GCRA then
    local drained = min(less(meter.at, tick), ticks_to_drain(meter, meter.full)) * meter.amount
    meter.level = max(meter.level, less(meter.full, drained))
    return
  end
  local cell = div(tick, meter.period)
  if cell == meter.cell then
    meter.current = max(meter.current, meter.capacity)
  elseif cell + 1 == meter.cell then
    meter.previous = max(meter.previous, meter.capacity)
  end
end

local function write_off(meter, holding)
  if meter.counted then charge(meter, holding.amount, holding.cell) end
end

local function note_gone(meter, other)
  meter.gone = meter.gone or {}
  meter.gone[#meter.gone + 1] = other
end

-- No grant ends before `first_us`, so until then there is nothing to look for. The first eight are looked at, and what is
-- after them says when to look again.
local function lapse_others(meter)
  if meter.others == 0 or now < meter.first_us then return end
  local first = call('ZRANGE', meter.ends, 0, LAPSES_PER_CALL, 'WITHSCORES')
  meter.first_us = NEVER_US
  for at = 1, #first, 2 do
    local other, until_us = first[at], first[at + 1] + 0
    if until_us > now or at > 2 * LAPSES_PER_CALL then
      meter.first_us = until_us
      return
    end
    if other ~= node then
      note_gone(meter, other)
      local text = call('HGET', meter.key, other)
      if text then
        local holding = read_holding(text)
        meter.others = meter.others - 1
        free(meter, holding)
        write_off(meter, holding)
      end
    end
  end
end

-- No grant ends later than `latest_us`, so after a clock was set back, and only then, there is something to look for.
local function shorten_others(meter)
  local latest_us = now + HELD_US_MAX
  if meter.others == 0 or meter.latest_us <= latest_us then return end
  local text = format(NUMBER, latest_us)
  local ahead = call('ZREVRANGEBYSCORE', meter.ends, '+inf', '(' .. text, 'LIMIT', 0, LAPSES_PER_CALL)
  meter.shortened = {}
  for _, other in ipairs(ahead) do
    local holding = other ~= node and call('HGET', meter.key, other)
    if holding then
      local amount, _, cell = read(HOLDING, holding)
      meter.shortened[#meter.shortened + 1] = { node = other, holding = pack(HOLDING, amount, latest_us, cell), ends = text }
    end
  end
  meter.first_us = min(meter.first_us, latest_us)
  if #ahead < LAPSES_PER_CALL then meter.latest_us = latest_us end
end

local function settle_own(meter, update, loss)
  local holding = release(meter)
  if not holding then
    local forgotten = loss > 0 and now < loss + 2 * LIFE_US_MAX
    if not meter.counted or forgotten then charge(meter, update.used, update.cell) end
    return update.used > 0 or update.keep > 0
  end
  if holding.until_us <= now then
    write_off(meter, holding)
    if not meter.counted then charge(meter, update.used, holding.cell) end
    return true
  end
  charge(meter, update.used, holding.cell)
  holding.amount = min(update.keep, less(holding.amount, update.used))
  -- Not longer than any may last, also after a clock was set back.
  holding.until_us = min(holding.until_us, now + HELD_US_MAX)
  hold(meter, holding)
  return false
end

local function settle(meter, update, loss, lost)
  local changed = adopt(meter, update.terms)
  roll(meter)
  distrust(meter, loss, changed)
  lapse_others(meter)
  shorten_others(meter)
  update.lapsed = settle_own(meter, update, loss)
  if not (lost and meter.counted) then refund(meter, update) end
  local wanted = meter.wanted
  if wanted and (wanted.until_us <= now or wanted.until_us > now + RECALL_US) then meter.wanted = false end
end

local function elapsed(meter) return meter.at - meter.cell * meter.period end

local function wanted_by_others(meter) return meter.wanted and meter.wanted.node ~= node end

local function standing(meter)
  local wanted = wanted_by_others(meter) and meter.wanted.units or 0
  local charged = meter.current
  if meter.kind == GCRA then charged = meter.held_before end
  return drops(meter, meter.held) + drops(meter, charged) + drops(meter, wanted)
end

local function fading(meter) return min(meter.previous + meter.held_before, meter.units_max) end

local function taken(meter)
  local draining = meter.level
  if meter.kind ~= GCRA then draining = fading(meter) * (meter.period - elapsed(meter)) end
  return standing(meter) + draining
end

local function room(meter) return less(meter.full, taken(meter)) end

local function passes(meter, cost, count)
  if cost > meter.burst or meter.amount == 0 then return 0 end
  if cost == 0 then return count end
  return min(div(room(meter), cost * meter.period), count)
end

local function admit(meter, units)
  charge(meter, units, meter.cell)
  if units > 0 and meter.wanted and meter.wanted.node == node then meter.wanted = false end
end

local function ticks_until_faded(meter, need)
  local stands = standing(meter) + need
  if stands > meter.full then return meter.period - elapsed(meter) end
  local overlap = div(meter.full - stands, max(fading(meter), 1))
  return less(less(meter.period, overlap), elapsed(meter))
end

local function wait_us(meter, units)
  if meter.amount == 0 then return NEVER_US end
  local need = units * meter.period
  local over = taken(meter) + need - meter.full
  if over <= 0 then return 0 end
  if meter.kind == GCRA then return ticks_us(meter, ticks_to_drain(meter, over), NEVER_US) end
  return ticks_us(meter, ticks_until_faded(meter, need), NEVER_US)
end

local function keep_for(meter, units)
  local is_large = units * (holders(meter) + 1) > meter.capacity
  local held = drops(meter, meter.held + meter.held_before)
  local helps = room(meter) + held >= drops(meter, units)
  if wanted_by_others(meter) or not is_large or not helps then return nil end
  meter.wanted = { node = node, units = units, until_us = now + RECALL_US }
  return RECALL_RETRY_US
end

local function denial_us(meter, units)
  if passes(meter, units, 1) == 1 then return 0 end
  if units > meter.burst or meter.amount == 0 then return NEVER_US end
  return keep_for(meter, units) or wait_us(meter, units)
end

local function life_us(meter, wanted)
  local life = min(wanted, LIFE_US_MAX)
  if meter.kind == GCRA then return life end
  return min(life, div((meter.period - elapsed(meter)) * meter.tick * 16, 17))
end

-- A grant ends with its cell, and is held until the node has said what it spent of it.
local function told_over(meter, holding)
  return pack(TOLD, holding.amount, 0, div(room(meter), meter.period), 0, holding.cell, holders(meter), 0)
end

local function grant(meter, update)
  if meter.own and meter.own.cell ~= grant_cell(meter) then return told_over(meter, meter.own) end
  local before = release(meter)
  local kept = before and before.amount or 0
  local sharers = holders(meter) + 1
  local units = div(less(room(meter), drops(meter, kept)), meter.period)
  local want = min(update.want, meter.capacity)
  local extra = min(less(want, kept), max(div(units, sharers), min(units, 1)))
  local life = life_us(meter, update.life)
  local until_us = now + life + div(life, 16) + LAPSE_MARGIN_US
  local amount, cell = kept + extra, grant_cell(meter)
  hold(meter, { amount = amount, until_us = until_us, cell = cell })
  meter.latest_us = max(meter.latest_us, until_us)
  local flags = (amount < want and 1 or 0) + (update.lapsed and 2 or 0) + (wanted_by_others(meter) and 4 or 0)
  return pack(TOLD, amount, life, units - extra, wait_us(meter, 1), cell, sharers, flags)
end

local function kept_us(meter)
  local ticks = 2 * meter.period
  if meter.kind == GCRA then
    ticks = ticks_to_drain(meter, meter.level + drops(meter, meter.held + meter.held_before))
  end
  return ticks_us(meter, ticks, DEBT_US_MAX) + HELD_US_MAX + RETENTION_US
end

local function milliseconds(us) return format(NUMBER, div_up(us, 1000)) end

-- A key is kept a little longer than it has to be, so that not every call has to say for how long.
local function save_meter(meter, us)
  local wanted, count, own = meter.wanted, holders(meter), meter.own
  if own then meter.first_us = min(meter.first_us, own.until_us) end
  local expires = now + us > meter.ends_us
  if expires then meter.ends_us = now + us + div(us, 8) end
  local kept = pack(METER, meter.level, meter.at, meter.cell, meter.current, meter.previous, meter.held,
    meter.held_before, meter.charged, meter.refunded, meter.loss, count, meter.ends_us, meter.latest_us, meter.first_us,
    wanted and wanted.units or 0, wanted and wanted.until_us or 0, wanted and wanted.node or NOBODY)
  local holding = own and pack(HOLDING, own.amount, own.until_us, own.cell)
  if meter.is_new and own then
    call('HSET', meter.key, 'm', kept, node, holding, 't', meter.terms)
  elseif meter.is_new then
    call('HSET', meter.key, 'm', kept, 't', meter.terms)
  elseif own then
    call('HSET', meter.key, 'm', kept, node, holding)
  else
    call('HSET', meter.key, 'm', kept)
  end
  if own then
    call('ZADD', meter.ends, format(NUMBER, own.until_us), node)
  elseif meter.had_own then
    note_gone(meter, node)
  end
  if meter.gone then
    call('HDEL', meter.key, unpack(meter.gone))
    call('ZREM', meter.ends, unpack(meter.gone))
  end
  for _, other in ipairs(meter.shortened or {}) do
    call('HSET', meter.key, other.node, other.holding)
    call('ZADD', meter.ends, other.ends, other.node)
  end
  if expires then call('PEXPIRE', meter.key, milliseconds(meter.ends_us - now)) end
  -- The index is made anew with the first holder, and outlives what it is an index of: a grant that is not in it would
  -- never lapse.
  if count > 0 and (expires or not meter.is_held) then
    call('PEXPIRE', meter.ends, milliseconds(meter.ends_us - now + INDEX_EXTRA_US))
  end
end

-- The store

-- Where the store is, which life of it this is, and which life it took over from. One that does not say counts as always
-- the same: then only what nodes remember tells that writes were lost.
local function who_answers()
  local place = '-'
  if clustered == 1 then
    local id = redis.pcall('CLUSTER', 'MYID')
    if type(id) == 'string' then place = id end
  end
  local info = redis.pcall('INFO', 'replication')
  if type(info) ~= 'string' then return place, '-', '-' end
  return place, match(info, 'master_replid:(%x+)') or '-', match(info, 'master_replid2:(%x+)') or '-'
end

local function load_store(text)
  if not text then return { place = '', life = '', loss = 0, checked = 0, until_us = 0, known = false, changed = false } end
  local loss, checked, until_us = read(STORE, text)
  local place, life = match(sub(text, STORE_BYTES + 1), '^(%S+) (%S+)$')
  return {
    place = place, life = life, loss = loss, checked = checked, until_us = until_us, known = true, changed = false,
  }
end

local function took_over(store)
  if store.known and now >= store.checked and now - store.checked < IDENTITY_US then return false end
  local place, life, parent = who_answers()
  local another = store.known and store.life ~= life and (store.place == place or store.life == parent)
  store.place, store.life, store.checked, store.changed = place, life, now, true
  return another
end

-- The store's own key outlives every meter, or a loss would go unnoticed for those that are left.
local function save_store(store, us)
  us = max(us, LANE_RETENTION_US)
  if not store.changed and now + us <= store.until_us then return end
  store.until_us = max(store.until_us, now + us + div(us, 8))
  local text = pack(STORE, store.loss, store.checked, store.until_us) .. store.place .. ' ' .. store.life
  call('SET', KEYS[1], text, 'PX', milliseconds(min(store.until_us - now, 2 * DEBT_US_MAX)))
end

-- The call

local answered, told = 0, 0
local before = call('MGET', KEYS[1], KEYS[2])
if before[2] then
  answered, told = read(LANE, before[2])
  if sequence == answered then return sub(before[2], LANE_BYTES + 1) end
  if sequence < answered then return pack(REPLY, OUTDATED, answered) end
end

local store = load_store(before[1])
local taken_over = took_over(store)
local noticed = acknowledged > answered or taken_over
if noticed then store.loss, store.changed = now, true end
local lost = noticed or (acknowledged > 0 and store.loss ~= told)

local meters, said = {}, {}
for i = 1, updates do
  local terms, used, back, back_of, keep, want, life, cell, next_byte = read(UPDATE, numbers, at_byte)
  at_byte = next_byte
  local update = {
    terms = terms, used = used, refund = back, refund_of = back_of, keep = keep, want = want, life = life, cell = cell,
    lapsed = false,
  }
  meters[i], said[i] = load_meter(1 + 2 * i, terms), update
  settle(meters[i], update, store.loss, lost)
end

local reply = { pack(REPLY, now, lost and 1 or 0) }
local decided = {}
for i = 1, asks do
  local count, many, first_byte = read(ASK, numbers, at_byte)
  local passed, denied_by, retry = count, 0, 0
  at_byte = first_byte
  for _ = 1, many do
    local place, cost, next_byte = read(CHARGE, numbers, at_byte)
    passed, at_byte = min(passed, passes(meters[place + 1], cost, count)), next_byte
  end
  at_byte = first_byte
  for _ = 1, many do
    local place, cost, next_byte = read(CHARGE, numbers, at_byte)
    local meter = meters[place + 1]
    at_byte = next_byte
    admit(meter, passed * cost)
    if passed ~= count then
      local wait = denial_us(meter, cost)
      if wait > retry then denied_by, retry = place, wait end
    end
  end
  decided[i] = pack(DECIDED, passed, denied_by, retry)
end

local longest = 0
for i = 1, updates do reply[#reply + 1] = grant(meters[i], said[i]) end
for i = 1, asks do reply[#reply + 1] = decided[i] end
reply = table.concat(reply)

for i = 1, updates do
  local us = kept_us(meters[i])
  longest = max(longest, us)
  save_meter(meters[i], us)
end
save_store(store, longest)
call('SET', KEYS[2], pack(LANE, sequence, store.loss) .. reply, 'PX', milliseconds(LANE_RETENTION_US))
return reply
