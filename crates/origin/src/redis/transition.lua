-- The transition of `tidegate_core::origin::Partition::apply`, step by step: a test holds the two against each other on
-- random histories. Everything is read and decided before anything is written, so that a call is applied whole or not at
-- all. Every number is whole and below 2^53, where a double is exact, and is written with '%.0f': `..` would round it.
--
-- KEYS  the store's own, the lane's, and for each meter its own and that of its holders by the end of their grants
-- ARGV  'node sequence acknowledged clustered meters asks'; a line for each meter; a line for each ask: how many, then the
--       place of each of their meters and what they cost there

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
local NUMBER = '%.0f'
local TOLD = '%.0f %.0f %.0f %.0f %.0f %.0f %.0f'
local DECIDED = '%.0f %.0f %.0f'
local TERMS = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$'
local UPDATE = '^(%d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$'
local HOLDING = '^(%d+) (%d+) (%d+)$'
local METER_READ = '^' .. string.rep('(%d+) ', 15) .. '(%S+)$'
local METER_WRITE = string.rep('%.0f ', 15) .. '%s'

local format, match, floor = string.format, string.match, math.floor
local unpack = table.unpack or unpack

local n = tonumber
local function min(a, b)
  if a < b then return a end
  return b
end
local function max(a, b)
  if a > b then return a end
  return b
end
local function div(a, b) return floor(a / b) end
local function div_up(a, b) return floor((a + b - 1) / b) end
local function less(a, b)
  if a > b then return a - b end
  return 0
end

local node, sequence, acknowledged, clustered, updates, asks =
  match(ARGV[1], '^(%x+) (%d+) (%d+) (%d) (%d+) (%d+)$')
sequence, acknowledged, updates, asks = n(sequence), n(acknowledged), n(updates), n(asks)

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- Terms

local parsed = {}

local function parse_terms(text)
  local kind, amount, period, tick, burst, capacity, counted, version = match(text, TERMS)
  local terms = { kind = n(kind), amount = n(amount), period = n(period), tick = n(tick), burst = n(burst) }
  terms.capacity, terms.counted, terms.version = n(capacity), n(counted) == 1, n(version)
  terms.units_max, terms.full = div(DEBT_MAX, terms.period), terms.capacity * terms.period
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

local function load_meter(place, terms)
  local meter = { key = KEYS[place], ends = KEYS[place + 1], gone = {}, shortened = {} }
  local found = redis.call('HMGET', meter.key, 't', 'm', node)
  if not found[2] then
    set_terms(meter, terms)
    meter.is_new = true
    meter.level, meter.at = 0, div(now, meter.tick)
    meter.cell, meter.current, meter.previous = div(meter.at, meter.period), 0, 0
    meter.held, meter.held_before, meter.charged, meter.refunded, meter.loss = 0, 0, 0, 0, 0
    meter.others, meter.ends_us, meter.latest_us = 0, 0, 0
    return meter
  end
  set_terms(meter, found[1])
  local level, at, cell, current, previous, held, held_before, charged, refunded, loss, holders, ends_us,
    latest_us, units, until_us, whose = match(found[2], METER_READ)
  meter.level, meter.at, meter.cell = n(level), n(at), n(cell)
  meter.current, meter.previous = n(current), n(previous)
  meter.held, meter.held_before = n(held), n(held_before)
  meter.charged, meter.refunded, meter.loss = n(charged), n(refunded), n(loss)
  meter.others, meter.ends_us, meter.latest_us = n(holders), n(ends_us), n(latest_us)
  meter.is_held = meter.others > 0
  if whose ~= '-' then meter.wanted = { node = whose, units = n(units), until_us = n(until_us) } end
  if found[3] then
    local amount, ends, of = match(found[3], HOLDING)
    meter.own = { amount = n(amount), until_us = n(ends), cell = n(of) }
    meter.had_own = true
    meter.others = meter.others - 1
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
  meter.own = nil
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
  if terms == meter.terms or n(match(terms, '%d+$')) < meter.version then return false end
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

local function lapse_others(meter)
  if meter.others == 0 then return end
  local over = redis.call('ZRANGEBYSCORE', meter.ends, '-inf', format(NUMBER, now), 'LIMIT', 0, LAPSES_PER_CALL)
  for _, other in ipairs(over) do
    if other ~= node then
      meter.gone[#meter.gone + 1] = other
      local text = redis.call('HGET', meter.key, other)
      if text then
        local amount, until_us, cell = match(text, HOLDING)
        local holding = { amount = n(amount), until_us = n(until_us), cell = n(cell) }
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
  local ahead = redis.call('ZREVRANGEBYSCORE', meter.ends, '+inf', '(' .. text, 'LIMIT', 0, LAPSES_PER_CALL)
  for _, other in ipairs(ahead) do
    local holding = other ~= node and redis.call('HGET', meter.key, other)
    if holding then
      local amount, cell = match(holding, '^(%d+) %d+ (%d+)$')
      meter.shortened[#meter.shortened + 1] = { node = other, holding = amount .. ' ' .. text .. ' ' .. cell, ends = text }
    end
  end
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
  if wanted and (wanted.until_us <= now or wanted.until_us > now + RECALL_US) then meter.wanted = nil end
end

local function elapsed(meter) return meter.at - meter.cell * meter.period end

local function wanted_by_others(meter) return meter.wanted ~= nil and meter.wanted.node ~= node end

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
  if units > 0 and meter.wanted and meter.wanted.node == node then meter.wanted = nil end
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
  return format(TOLD, holding.amount, 0, div(room(meter), meter.period), 0, holding.cell, holders(meter), 0)
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
  return format(TOLD, amount, life, units - extra, wait_us(meter, 1), cell, sharers, flags)
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
  local wanted = meter.wanted or { node = '-', units = 0, until_us = 0 }
  local count = holders(meter)
  local expires = now + us > meter.ends_us
  if expires then meter.ends_us = now + us + div(us, 8) end
  local text = format(METER_WRITE, meter.level, meter.at, meter.cell, meter.current, meter.previous, meter.held,
    meter.held_before, meter.charged, meter.refunded, meter.loss, count, meter.ends_us, meter.latest_us, wanted.units,
    wanted.until_us, wanted.node)
  local fields = { 'm', text }
  if meter.is_new then fields[3], fields[4] = 't', meter.terms end
  local own = meter.own
  if own then
    local until_us = format(NUMBER, own.until_us)
    fields[#fields + 1] = node
    fields[#fields + 1] = format('%.0f %s %.0f', own.amount, until_us, own.cell)
    redis.call('ZADD', meter.ends, until_us, node)
  elseif meter.had_own then
    meter.gone[#meter.gone + 1] = node
  end
  redis.call('HSET', meter.key, unpack(fields))
  if #meter.gone > 0 then
    redis.call('HDEL', meter.key, unpack(meter.gone))
    redis.call('ZREM', meter.ends, unpack(meter.gone))
  end
  for _, other in ipairs(meter.shortened) do
    redis.call('HSET', meter.key, other.node, other.holding)
    redis.call('ZADD', meter.ends, other.ends, other.node)
  end
  if expires then redis.call('PEXPIRE', meter.key, milliseconds(meter.ends_us - now)) end
  -- The index is made anew with the first holder, and outlives what it is an index of: a grant that is not in it would
  -- never lapse.
  if count > 0 and (expires or not meter.is_held) then
    redis.call('PEXPIRE', meter.ends, milliseconds(meter.ends_us - now + INDEX_EXTRA_US))
  end
end

-- The store

-- Where the store is, which life of it this is, and which life it took over from. One that does not say counts as always
-- the same: then only what nodes remember tells that writes were lost.
local function who_answers()
  local place = '-'
  if clustered == '1' then
    local id = redis.pcall('CLUSTER', 'MYID')
    if type(id) == 'string' then place = id end
  end
  local info = redis.pcall('INFO', 'replication')
  if type(info) ~= 'string' then return place, '-', '-' end
  return place, match(info, 'master_replid:(%x+)') or '-', match(info, 'master_replid2:(%x+)') or '-'
end

local function load_store()
  local text = redis.call('GET', KEYS[1])
  if not text then return { place = '', life = '', loss = 0, checked = 0, until_us = 0 } end
  local place, life, loss, checked, until_us = match(text, '^(%S+) (%S+) (%d+) (%d+) (%d+)$')
  return { place = place, life = life, loss = n(loss), checked = n(checked), until_us = n(until_us), known = true }
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
  local text =
    format('%s %s %.0f %.0f %.0f', store.place, store.life, store.loss, store.checked, store.until_us)
  redis.call('SET', KEYS[1], text, 'PX', milliseconds(min(store.until_us - now, 2 * DEBT_US_MAX)))
end

-- The call

local answered, told = 0, 0
local lane = redis.call('GET', KEYS[2])
if lane then
  local last, loss, reply = match(lane, '^(%d+) (%d+) (.*)$')
  answered, told = n(last), n(loss)
  if sequence == answered then return reply end
  if sequence < answered then return 'outdated ' .. last end
end

local store = load_store()
local taken_over = took_over(store)
local noticed = acknowledged > answered or taken_over
if noticed then store.loss, store.changed = now, true end
local lost = noticed or (acknowledged > 0 and store.loss ~= told)

local meters, said = {}, {}
for i = 1, updates do
  local terms, used, back, back_of, keep, want, life, cell = match(ARGV[1 + i], UPDATE)
  local update = { terms = terms, used = n(used), refund = n(back), refund_of = n(back_of), keep = n(keep) }
  update.want, update.life, update.cell = n(want), n(life), n(cell)
  meters[i], said[i] = load_meter(1 + 2 * i, terms), update
  settle(meters[i], update, store.loss, lost)
end

local decided = {}
for i = 1, asks do
  local numbers = {}
  for number in string.gmatch(ARGV[1 + updates + i], '%d+') do numbers[#numbers + 1] = n(number) end
  local count = numbers[1]
  local passed, denied_by, retry = count, 0, 0
  for at = 2, #numbers, 2 do passed = min(passed, passes(meters[numbers[at] + 1], numbers[at + 1], count)) end
  for at = 2, #numbers, 2 do
    local meter, cost = meters[numbers[at] + 1], numbers[at + 1]
    admit(meter, passed * cost)
    if passed ~= count then
      local wait = denial_us(meter, cost)
      if wait > retry then denied_by, retry = numbers[at], wait end
    end
  end
  decided[i] = format(DECIDED, passed, denied_by, retry)
end

local reply = { format(NUMBER, now), lost and '1' or '0' }
local longest = 0
for i = 1, updates do reply[#reply + 1] = grant(meters[i], said[i]) end
for i = 1, asks do reply[#reply + 1] = decided[i] end
reply = table.concat(reply, ' ')

for i = 1, updates do
  local us = kept_us(meters[i])
  longest = max(longest, us)
  save_meter(meters[i], us)
end
save_store(store, longest)
redis.call('SET', KEYS[2], format('%.0f %.0f %s', sequence, store.loss, reply), 'PX', milliseconds(LANE_RETENTION_US))
return reply
