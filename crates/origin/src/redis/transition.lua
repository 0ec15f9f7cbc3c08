-- The transition of `tidegate_core::origin::Partition::apply`, step by step: a test holds the two against each other on
-- random histories. Everything is read and decided before anything is written, so that a call is applied whole or not at
-- all.
--
-- KEYS  the store's own, the lane's, and for each meter its own and that of its holders by the end of their grants; for limits
--       that are counted together with other regions, until when those count as heard of, the marks, and the meters of which
--       something was charged to the standing part
-- ARGV  the node; then the numbers of the call: its sequence, the last that was acknowledged, whether the store is a
--       cluster, for how long the node has known the origin, how many meters and asks there are; of each meter what the limit is and what is said; of each ask how
--       many wait, how many meters they have, and the place of each of them with what it costs there
--
-- There are two of this script: one for limits of one region, and one that also knows those of several.

local LAPSES_PER_CALL_MAX = 8
local LAPSE_MARGIN_US = 300000
local LIFE_US_MAX = 10000000
local CROSS_REGION_LIFE_US_MAX = 1000000
local RECALL_US = 300000
local RECALL_RETRY_US = 200000
local ISOLATED_RETRY_US = 1000000
local SESSION_RETENTION_US = 3600000000
local LOST_MARGIN_US = 2000000
local REPORT_US_MIN, REPORT_US_MAX, REPORTS_PER_BURST = 5000, 100000, 8
local ROOM_PARTS, ONE_PARTS, HOLDER_PARTS = 4, 8, 64

local HEADER = '<dddddd'
local UPDATE, UPDATE_CROSS_REGION = '<c64dddddddd', '<c104dddddddd'
local CHECK_GROUP, CHARGE = '<dd', '<dd'
local NODE_GRANT = '<dddd'
local SESSION, SESSION_BYTES = '<dd', 16
local REPLY, METER_REPLY, CHECK_REPLY = '<dd', '<dddddddd', '<ddd'
local OUTDATED, NEEDS_CROSS_REGION = -1, -2

local node, numbers = ARGV[1], ARGV[2]
local sequence, acknowledged, clustered, known_us, updates, checks, at_byte = read(HEADER, numbers)
if IS_CROSS_REGION then connectivity_key, dirty_key, isolated_key = KEYS[#KEYS - 2], KEYS[#KEYS - 1], KEYS[#KEYS] end

-- One meter

local function read_node_grant(text)
  local amount, until_us, cell, want = read(NODE_GRANT, text)
  return { amount = amount, until_us = until_us, cell = cell, want = want }
end

local function grant_cell(meter)
  if meter.kind == GCRA then return 0 end
  return meter.cell
end

local function free(meter, node_grant)
  local own, other = 'held_before', 'held'
  if node_grant.cell == grant_cell(meter) then own, other = other, own end
  local rest = less(node_grant.amount, meter[own])
  meter[own] = meter[own] - (node_grant.amount - rest)
  meter[other] = less(meter[other], rest)
  meter.wants = meter.wants - node_grant.want
end

local function release(meter)
  local node_grant = meter.own
  meter.own = false
  if node_grant then free(meter, node_grant) end
  return node_grant
end

local function hold(meter, node_grant)
  if node_grant.amount == 0 and node_grant.want == 0 then return end
  meter.wants = meter.wants + node_grant.want
  local of = node_grant.cell == grant_cell(meter) and 'held' or 'held_before'
  meter[of] = meter[of] + node_grant.amount
  meter.own = node_grant
end

-- Where cells have become others since a grant was made, it counts in the last one in which it may be spent.
local function cell_of(meter, node_grant)
  local cell = node_grant.cell
  if cell == meter.cell or cell + 1 == meter.cell then return cell end
  return min(meter.cell, div(div(node_grant.until_us, meter.tick), meter.period))
end

local function charge(meter, units, cell)
  local out, tank = meter.out, meter
  meter.charged = min(meter.charged + units, TOTAL_MAX)
  if IS_CROSS_REGION and out then
    if out.connectivity ~= ISOLATED or meter.kind == GCRA then pour(meter, out.own, units, cell) end
    if out.connectivity ~= CONNECTED then tank = out.isolated end
  end
  pour(meter, tank, units, cell)
  if IS_CROSS_REGION and out and out.connectivity ~= ISOLATED then tell(meter, units) end
end

-- Others get back what was really given back, and of a window nothing.
local function refund(meter, update)
  local units, out, tank = update.refund, meter.out, meter
  meter.refunded = min(meter.refunded + units, TOTAL_MAX)
  if IS_CROSS_REGION and out and out.connectivity ~= CONNECTED then tank = out.isolated end
  if meter.kind == GCRA then
    local amount = drops(meter, units)
    local age = update.refund_of == 0 and 0 or less(meter.at, div(update.refund_of, meter.tick))
    local drained = min(age, ticks_to_drain(meter, amount)) * meter.amount
    local back = min(tank.level, less(amount, drained))
    tank.level = tank.level - back
    if IS_CROSS_REGION and out then
      out.own.level = less(out.own.level, back)
      if out.connectivity ~= ISOLATED then out.refunded = min(out.refunded + div(back, meter.period), TOTAL_MAX) end
    end
  elseif update.cell == meter.cell then
    tank.current = less(tank.current, units)
  elseif update.cell + 1 == meter.cell then
    tank.previous = less(tank.previous, units)
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

local function note_gone(meter, other)
  meter.gone = meter.gone or {}
  meter.gone[#meter.gone + 1] = other
end

local function raise(tank, level, current, previous)
  tank.level, tank.current = max(tank.level, level), max(tank.current, current)
  tank.previous = max(tank.previous, previous)
end

local resize_others, copy, disown, adopt_cross_region

if IS_CROSS_REGION then
  resize_others = function(meter, period)
    local own, isolated = meter.out.own, meter.out.isolated
    own.level, isolated.level = drops(meter, div_up(own.level, period)), drops(meter, div_up(isolated.level, period))
  end

  copy = function(tank) return { level = tank.level, current = tank.current, previous = tank.previous } end

  -- Others hear under a new name of what may have been lost, and of what this region is known to have charged, if that is more;
  -- of what was charged to the standing part when they are heard of again.
  disown = function(meter, loss, level, current, previous)
    local out = meter.out
    local own, untold = empty_tank(), out.connectivity == ISOLATED and out.isolated.level or 0
    if meter.counted then
      own.level, own.current, own.previous = less(out.own.level, untold), out.own.current, out.own.previous
      raise(own, level, current, previous)
    end
    begin(meter, loss, own)
    own.level = min(own.level + untold, LEVEL_MAX)
  end

  adopt_cross_region = function(meter, recounts)
    local out = meter.out
    if out and not meter.cross_region then
      meter.out = false
      note_gone(meter, 'x')
    elseif out and recounts then
      begin(meter, now, empty_tank())
      note_gone(meter, 'x')
    elseif meter.cross_region and not out then
      meter.out = new_region_state(now)
      meter.out.own, meter.out.charged = copy(meter), tank_units(meter, meter)
    end
    set_force(meter)
  end
end

local function adopt(meter, terms)
  if terms == meter.terms or (parsed[terms] or parse_terms(terms)).version < meter.version then return false end
  -- Until now what was charged drained by the limit that there was.
  roll(meter)
  local kind, period, tick = meter.kind, meter.period, meter.tick
  set_terms(meter, terms)
  meter.is_new = true
  if period ~= meter.period then
    meter.level = drops(meter, div_up(meter.level, period))
    if IS_CROSS_REGION and meter.out then resize_others(meter, period) end
  end
  if tick ~= meter.tick then meter.at = div(meter.at * tick, meter.tick) end
  local both_gcra = kind == GCRA and meter.kind == GCRA
  local recounts = not both_gcra and (kind ~= meter.kind or period * tick ~= meter.period * meter.tick)
  if IS_CROSS_REGION and meter.out and (recounts or not meter.cross_region) then stand_on(meter, CONNECTED) end
  if recounts then recount(meter, kind) end
  if IS_CROSS_REGION then adopt_cross_region(meter, recounts) end
  return true
end

-- What is left of a limit that was full then.
local function left_of_full(meter, loss_at)
  local tick = div(loss_at, meter.tick)
  local cell = div(tick, meter.period)
  if meter.kind == GCRA then
    local drained = min(less(meter.at, tick), ticks_to_drain(meter, meter.full)) * meter.amount
    return less(meter.full, drained), 0, 0
  elseif cell == meter.cell then
    return 0, meter.capacity, 0
  elseif cell + 1 == meter.cell then
    return 0, 0, meter.capacity
  end
  return 0, 0, 0
end

local function distrust(meter, store, changed)
  local known = meter.loss == store.loss
  meter.loss = store.loss
  if store.loss == 0 or (known and not changed) then return end
  local level, current, previous = 0, 0, 0
  if meter.counted then level, current, previous = left_of_full(meter, store.loss_at) end
  raise(meter, level, current, previous)
  if IS_CROSS_REGION and meter.out and not known then disown(meter, store.loss, level, current, previous) end
end

-- No grant ends before `first_us`, so until then there is nothing to look for. The first eight are looked at, and what is
-- after them says when to look again.
local function lapse_others(meter)
  if meter.others == 0 or now < meter.first_us then return end
  local first = call('ZRANGE', meter.ends, 0, LAPSES_PER_CALL_MAX, 'WITHSCORES')
  meter.first_us = NEVER_US
  for at = 1, #first, 2 do
    local other, until_us = first[at], first[at + 1] + 0
    if until_us > now or at > 2 * LAPSES_PER_CALL_MAX then
      meter.first_us = until_us
      return
    end
    if other ~= node then
      note_gone(meter, other)
      local text = call('HGET', meter.key, other)
      if text then
        local node_grant = read_node_grant(text)
        meter.others = meter.others - 1
        free(meter, node_grant)
        if meter.counted then charge(meter, node_grant.amount, cell_of(meter, node_grant)) end
      end
    end
  end
end

-- No grant ends later than `latest_us`, so after a clock was set back, and only then, there is something to look for.
local function shorten_others(meter)
  local latest_us = now + GRANT_US_MAX
  if meter.others == 0 or meter.latest_us <= latest_us then return end
  local text = format(NUMBER, latest_us)
  local ahead = call('ZREVRANGEBYSCORE', meter.ends, '+inf', '(' .. text, 'LIMIT', 0, LAPSES_PER_CALL_MAX)
  meter.shortened = {}
  for _, other in ipairs(ahead) do
    local node_grant = other ~= node and call('HGET', meter.key, other)
    if node_grant then
      local amount, _, cell, want = read(NODE_GRANT, node_grant)
      local shortened = pack(NODE_GRANT, amount, latest_us, cell, want)
      meter.shortened[#meter.shortened + 1] = { node = other, node_grant = shortened, ends = text }
    end
  end
  meter.first_us = min(meter.first_us, latest_us)
  if #ahead < LAPSES_PER_CALL_MAX then meter.latest_us = latest_us end
end

local function settle_own(meter, update, store)
  charge(meter, update.owed, meter.cell)
  local node_grant = release(meter)
  if not node_grant then
    local forgotten = store.loss > 0 and now < store.loss_at + 2 * LIFE_US_MAX
    if not meter.counted or forgotten then charge(meter, update.used, update.cell) end
    return update.used > 0 or update.keep > 0
  end
  if node_grant.until_us <= now then
    if meter.counted then
      charge(meter, node_grant.amount, cell_of(meter, node_grant))
    else
      charge(meter, update.used, node_grant.cell)
    end
    return node_grant.amount > 0 or update.used > 0
  end
  charge(meter, update.used, cell_of(meter, node_grant))
  node_grant.amount = min(update.keep, less(node_grant.amount, update.used))
  -- Not longer than any may last, also after a clock was set back.
  node_grant.until_us = min(node_grant.until_us, now + GRANT_US_MAX)
  hold(meter, node_grant)
  return false
end

local function settle(meter, update, store, lost)
  local since_us = meter.at * meter.tick
  local changed = adopt(meter, update.terms)
  roll(meter)
  if IS_CROSS_REGION then regard(meter, div(since_us, meter.tick)) end
  distrust(meter, store, changed)
  lapse_others(meter)
  shorten_others(meter)
  update.lapsed = settle_own(meter, update, store)
  if not (lost and meter.counted) then refund(meter, update) end
  local wanted = meter.wanted
  if wanted and (wanted.until_us <= now or wanted.until_us > now + RECALL_US) then meter.wanted = false end
end

local function elapsed(meter) return meter.at - meter.cell * meter.period end

local function wanted_by_others(meter) return meter.wanted and meter.wanted.node ~= node end

local function standing(meter)
  local wanted = wanted_by_others(meter) and meter.wanted.units or 0
  local charged = meter.held_before
  if meter.kind ~= GCRA then
    charged = meter.current
    if IS_CROSS_REGION then charged = used(meter, 'current') end
  end
  return drops(meter, meter.held) + drops(meter, charged) + drops(meter, wanted)
end

local function fading(meter)
  local previous = meter.previous
  if IS_CROSS_REGION then previous = used(meter, 'previous') end
  return min(previous + meter.held_before, meter.units_max)
end

local function taken(meter)
  if meter.kind == GCRA then
    local level = meter.level
    if IS_CROSS_REGION then level = used(meter, 'level') end
    return standing(meter) + level
  end
  return standing(meter) + fading(meter) * (meter.period - elapsed(meter))
end

local function room(meter) return less(meter.room_max, taken(meter)) end

-- A request that waits may pass what others hold by the tolerance, but neither what was used nor what its node holds.
local function room_to_pass(meter)
  local out = meter.out
  if meter.tolerance == 0 or IS_CROSS_REGION and out and out.connectivity ~= CONNECTED then return room(meter) end
  local own = meter.own and meter.own.amount or 0
  local charged, others = taken(meter), drops(meter, less(meter.held, own))
  return min(less(meter.room_max + drops(meter, meter.tolerance), charged), less(meter.room_max + others, charged))
end

local function remaining(meter)
  local charged
  if meter.kind == GCRA then
    charged = meter.level
    if IS_CROSS_REGION then charged = used(meter, 'level') end
  else
    local current, previous = meter.current, meter.previous
    if IS_CROSS_REGION then current, previous = used(meter, 'current'), used(meter, 'previous') end
    charged = drops(meter, current) + min(previous, meter.units_max) * (meter.period - elapsed(meter))
  end
  return div(less(meter.room_max, charged), meter.period)
end

local function passes(meter, cost, count)
  if cost > meter.burst or meter.rate == 0 then return 0 end
  if cost == 0 then return count end
  return min(div(room_to_pass(meter), cost * meter.period), count)
end

local function ticks_until_faded(meter, need)
  local stands = standing(meter) + need
  if stands > meter.room_max then return meter.period - elapsed(meter) end
  local overlap = div(meter.room_max - stands, max(fading(meter), 1))
  return less(less(meter.period, overlap), elapsed(meter))
end

local function wait_us(meter, units)
  if meter.amount == 0 then return NEVER_US end
  if meter.rate == 0 then return ISOLATED_RETRY_US end
  local need = units * meter.period
  local over = taken(meter) + need - meter.room_max
  if over <= 0 then return 0 end
  if meter.kind == GCRA then return ticks_us(meter, div_up(over, meter.rate), NEVER_US) end
  return ticks_us(meter, ticks_until_faded(meter, need), NEVER_US)
end

local function keep_for(meter, units)
  -- A holder of a grant has one unit at least.
  local granted = min(meter.others, meter.held + meter.held_before)
  local is_large = units * (granted + 1) > meter.most
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
  local life = min(wanted, meter.cross_region and CROSS_REGION_LIFE_US_MAX or LIFE_US_MAX)
  if meter.kind == GCRA then return life end
  return min(life, div((meter.period - elapsed(meter)) * meter.tick * 16, 17))
end

-- A grant ends with its cell, and is held until the node has said what it spent of it.
local function expired_reply(meter, node_grant)
  local flags = 0
  if IS_CROSS_REGION then flags = connected_flag(meter) end
  local units = div(room(meter), meter.period)
  return pack(METER_REPLY, node_grant.amount, 0, units, remaining(meter), 0, node_grant.cell, holders(meter), flags)
end

-- Units that drain between two reports of a node, at most all there are.
local function drained_per_report(meter)
  if meter.rate == 0 then return 0 end
  local most = max(div(REPORT_US_MAX, meter.tick), 1)
  local least = min(div_up(REPORT_US_MIN, meter.tick), most)
  local ticks = max(min(div(div(meter.room_max, REPORTS_PER_BURST), meter.rate), most), least)
  return min(div(ticks * meter.rate, meter.period), meter.most)
end

local function grant(meter, update)
  if meter.own and meter.own.amount > 0 and meter.own.cell ~= grant_cell(meter) then return expired_reply(meter, meter.own) end
  local before = release(meter)
  local kept = before and before.amount or 0
  local nodes = holders(meter) + 1
  local units = meter.rate == 0 and 0 or div(less(room(meter), drops(meter, kept)), meter.period)
  local want = min(update.want, meter.most)
  local share = 0
  if want > 0 then share = div_up(want * SHARES, meter.wants + want) end
  local drained = drained_per_report(meter)
  local of_room = min(div(units * share, ROOM_PARTS * SHARES), 2 * max(min(update.used, units) + kept, 1) - kept)
  local one_from = nodes * HOLDER_PARTS <= meter.most and 1 or ONE_PARTS * nodes
  local extra = max(of_room, div(min(units, drained) * share, SHARES), units >= one_from and 1 or 0)
  extra = min(less(want, kept), extra)
  local life = life_us(meter, update.life)
  local until_us = now + life + div(life, 16) + LAPSE_MARGIN_US
  local amount, cell = kept + extra, grant_cell(meter)
  hold(meter, { amount = amount, until_us = until_us, cell = cell, want = want })
  meter.latest_us = max(meter.latest_us, until_us)
  local wait = wait_us(meter, 1)
  local is_short = amount < want and (units - extra) * SHARES < drained * (SHARES - share)
  local flags = ((meter.refused or wait > 0 or is_short) and 1 or 0) + (update.lapsed and 2 or 0) + (wanted_by_others(meter) and 4 or 0)
  if IS_CROSS_REGION then flags = flags + connected_flag(meter) end
  return pack(METER_REPLY, amount, life, units - extra, remaining(meter), wait, cell, nodes, flags)
end

local function save_meter(meter, us)
  local own = meter.own
  if own then meter.first_us = min(meter.first_us, own.until_us) end
  local kept, expires = pack_meter(meter, us)
  local node_grant = own and pack(NODE_GRANT, own.amount, own.until_us, own.cell, own.want)
  if meter.is_new and own then
    call('HSET', meter.key, 'm', kept, node, node_grant, 't', meter.terms)
  elseif meter.is_new then
    call('HSET', meter.key, 'm', kept, 't', meter.terms)
  elseif own then
    call('HSET', meter.key, 'm', kept, node, node_grant)
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
    call('HSET', meter.key, other.node, other.node_grant)
    call('ZADD', meter.ends, other.ends, other.node)
  end
  expire(meter, expires)
end

-- The store

-- The store's own key outlives every meter, or a loss would go unnoticed for those that are left.
local function save_store(store, us)
  us = max(us, SESSION_RETENTION_US)
  if not store.changed and now + us <= store.until_us then return end
  store.until_us = max(store.until_us, now + us + div(us, 8))
  local text = pack(STORE, store.loss, store.loss_at, store.until_us) .. store.place .. ' ' .. store.life
  call('SET', KEYS[1], text, 'PX', milliseconds(min(store.until_us - now, 2 * RETAINED_US_MAX)))
end

-- The call

local answered, told = 0, 0
local before = IS_CROSS_REGION and call('MGET', KEYS[1], KEYS[2], connectivity_key) or call('MGET', KEYS[1], KEYS[2])
if before[2] then
  answered, told = read(SESSION, before[2])
  if sequence == answered then
    -- As long as it is said it is remembered, or it would be applied again.
    call('PEXPIRE', KEYS[2], milliseconds(SESSION_RETENTION_US))
    local store = load_store(before[1])
    if store.known then save_store(store, SESSION_RETENTION_US) end
    return sub(before[2], SESSION_BYTES + 1)
  end
  if sequence < answered then return pack(REPLY, OUTDATED, answered) end
end

local connected_until_us = 0
if IS_CROSS_REGION then connected_until_us = read_connectivity(before[3]) end
local store = load_store(before[1])
local taken_over = took_over(store, clustered)
local noticed = acknowledged > answered or taken_over
-- Where a clock was set back to before a loss, that was just now.
if store.loss_at > now then store.loss_at, store.changed = now, true end
if noticed then
  store.loss, store.loss_at, store.changed = now, now, true
elseif not store.known and known_us > 0 then
  -- It remembers nothing, and the node has known an origin for longer than this store has been there.
  local up_us = how_long_us()
  noticed = known_us - div(known_us, 16) > up_us + LOST_MARGIN_US
  if noticed then store.loss, store.loss_at = less(now, up_us), less(now, up_us) end
end
local lost = noticed or (acknowledged > 0 and store.loss ~= told)

local meters, said = {}, {}
for i = 1, updates do
  local form = IS_CROSS_REGION and UPDATE_CROSS_REGION or UPDATE
  local terms, spent, owed, back, back_of, keep, want, life, cell, next_byte = read(form, numbers, at_byte)
  at_byte = next_byte
  if IS_CROSS_REGION and read(CROSS_REGION, terms, CROSS_REGION_AT) == 0 then terms = sub(terms, 1, TERMS_BYTES) end
  local update = {
    terms = terms, used = spent, owed = owed, refund = back, refund_of = back_of, keep = keep, want = want, life = life,
    cell = cell, lapsed = false,
  }
  local meter, held = load_meter(1 + 2 * i, terms, node)
  if held then meter.own, meter.had_own, meter.others = read_node_grant(held), true, meter.others - 1 end
  meters[i], said[i] = meter, update
  -- Others know it as a limit of several regions: that is for the other script.
  if not IS_CROSS_REGION and meter.out then return pack(REPLY, NEEDS_CROSS_REGION, 0) end
  settle(meter, update, store, lost)
end

local reply = { pack(REPLY, now, lost and 1 or 0) }
local decided = {}
for i = 1, checks do
  local count, many, first_byte = read(CHECK_GROUP, numbers, at_byte)
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
    charge(meter, passed * cost, meter.cell)
    if passed * cost > 0 and meter.wanted and meter.wanted.node == node then meter.wanted = false end
    if passed ~= count then
      local wait = denial_us(meter, cost)
      if wait > 0 and wait < NEVER_US then meter.refused = true end
      if wait > retry then denied_by, retry = place, wait end
    end
  end
  decided[i] = pack(CHECK_REPLY, passed, denied_by, retry)
end

local longest = 0
for i = 1, updates do reply[#reply + 1] = grant(meters[i], said[i]) end
for i = 1, checks do reply[#reply + 1] = decided[i] end
reply = table.concat(reply)

for i = 1, updates do
  if IS_CROSS_REGION then mark_dirty_if_due(meters[i]) end
  if IS_CROSS_REGION then note_isolated(meters[i]) end
  local us = kept_us(meters[i])
  longest = max(longest, us)
  save_meter(meters[i], us)
end
save_store(store, longest)
if IS_CROSS_REGION then save_dirty(connected_until_us) end
call('SET', KEYS[2], pack(SESSION, sequence, store.loss) .. reply, 'PX', milliseconds(SESSION_RETENTION_US))
return reply
