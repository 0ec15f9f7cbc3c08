-- What a partition knows of its store: which one it is, and when writes of it were last lost.

local STORE, STORE_BYTES = '<ddd', 24

-- Where the store is, which life of it this is, and which life it took over from. One that does not say counts as always
-- the same: then only what nodes remember tells that writes were lost.
local function who_answers(clustered)
  local place = '-'
  if clustered == 1 then
    local id = redis.pcall('CLUSTER', 'MYID')
    if type(id) == 'string' then place = id end
  end
  local info = redis.pcall('INFO', 'replication')
  if type(info) ~= 'string' then return place, '-', '-' end
  local life, parent = match(info, 'master_replid:(%x+)%s+master_replid2:(%x+)')
  return place, life or '-', parent or '-'
end

-- For how long it has been there, in whole seconds; for ever, if it does not say.
local function how_long_us()
  local info = redis.pcall('INFO', 'server')
  local seconds = type(info) == 'string' and match(info, 'uptime_in_seconds:(%d+)')
  return seconds and seconds * 1000000 or NEVER_US
end

local function load_store(text)
  if not text then return { place = '', life = '', loss = 0, loss_at = 0, until_us = 0, known = false, changed = true } end
  local loss, loss_at, until_us = read(STORE, text)
  local place, life = match(sub(text, STORE_BYTES + 1), '^(%S+) (%S+)$')
  return {
    place = place, life = life, loss = loss, loss_at = loss_at, until_us = until_us, known = true, changed = false,
  }
end

-- Asked in every call: of one that took over a moment ago, nothing may pass on what it did not hear of.
local function took_over(store, clustered)
  local place, life, parent = who_answers(clustered)
  local another = store.known and store.life ~= life and (store.place == place or store.life == parent)
  store.changed = store.changed or store.place ~= place or store.life ~= life
  store.place, store.life = place, life
  return another
end

