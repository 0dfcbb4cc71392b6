-- Every step of the limiter, for one tenant. Nothing else runs meanwhile: all counters change, or none.
-- Loaded once as a function: windows.lua stands before this text, and Python registers `main` after it.
--
-- KEYS  1: the tenant's leases; its other keys are made from it, share its hash tag, and so lie in its slot
-- ARGV  1: msgpack of {command, request id, lease ms, how long an ended reservation is remembered in ms,
--          tokens or -1 for unknown, ms to add to the server's time (tests only), what to note of the
--          request or '', money, and then, of a reservation, four for each limit: scope, unit, max, 1 if
--          enforced;
--          of heart-beats, three for each request: id, tokens so far, how far it has come or ''; of
--          `forget`, ids; of `seed`, three for each budget: name, spent, when that was read.
--          Money is empty, or of a reservation what it may cost, and three for each budget: name, max,
--          and what it does: 1 it refuses, 2 it only says what is spent, 0 it only counts; of `settle` what
--          it has cost, and when that was written in the ledger}
--
-- Running requests are a sorted set of ids by the end of their lease: it heals by itself.
-- A reservation is packed: end of lease, tokens reserved, used so far, lifetime, 1 if there is a note of it,
-- the money that it holds with the names of the budgets, and five for each scope: name, the bucket of each
-- window it was taken from or 0, and 1 if it counts as running. An ended one is its state's name.
-- What somebody noted of a reservation stands beside it, a hash of `note` and `progress`, until it ends. When
-- its lease ends instead, both go to the tenant's lost ones, a hash by id, until they are forgotten.

local MAX_SWEPT, NEVER, RELEASED = 64, -1, -1
local COMMAND, ID, LEASE_MS, REMEMBERED_MS, TOKENS, OFFSET_MS, NOTE, MONEY, LIMITS = 1, 2, 3, 4, 5, 6, 7, 8, 9
local COUNTS, REFUSES = 0, 1
-- What is spent is the ledger's to say: what we know of it is asked for anew after so long.
local SPENT_MS = 60000
-- Longer than any outage of all gateways: what is noted must be found by whoever comes back.
local NOTED_MS, MAX_LOST = 7 * 86400 * 1000, 64
local ENDS = {settled = true, released = true, expired = true}
local LEASE_END, RESERVED, PROGRESS, LIFETIME, NOTED, HELD, SCOPES = 1, 2, 3, 4, 5, 6, 7

-- Of the call that runs; `main` sets them anew, as those of the windows.
local ask, leases, num_swept

local function reservation_key(id)
  return base .. 'reservation:' .. id
end

local function note_key(id)
  return base .. 'note:' .. id
end

-- Its lease has ended and nobody has said how it went: what is known of it waits for whoever asks.
local function lose(id)
  local key = note_key(id)
  local found = redis.call('HMGET', key, 'note', 'progress')
  if found[1] then
    local lost = base .. 'lost'
    redis.call('HSET', lost, id, cmsgpack.pack({found[1], found[2] or ''}))
    keep(lost, NOTED_MS)
    redis.call('DEL', key)
  end
end

-- Settling and expiry correct the tokens to what was used; the request was made. Release gives all back.
local function correct(scope, unit, bucket, reserved, used)
  if used > reserved then
    -- Charged now: the bucket of the reservation may have left the window, and with it the charge.
    take(scope, unit, used - reserved)
  else
    give_back(scope, unit, bucket, reserved - math.max(used, 0))
  end
end

local function spent_key(name)
  return base .. 'spent:' .. name
end

local function held_key(name)
  return base .. 'held:' .. name
end

local function number_at(key)
  return tonumber(redis.call('GET', key) or 0) or 0
end

local function spent_of(name)
  local raw = redis.call('GET', spent_key(name))
  local is_right, spent = pcall(cmsgpack.unpack, raw or '')
  if raw and is_right and type(spent) == 'table' and type(spent[1]) == 'number' then
    return spent
  end
end

local function hold_money(names, cost, lifetime)
  for at = 2, #names do
    local key = held_key(names[at])
    local held = number_at(key) + cost
    if held > 0 then
      redis.call('SET', key, string.format('%.0f', held), 'KEEPTTL')
      keep(key, lifetime)
    else
      redis.call('DEL', key)
    end
  end
end

-- What was written in the ledger after its sum was read is not in that sum yet.
local function spend(names, cost, written_at)
  for at = 2, #names do
    local spent = spent_of(names[at])
    if spent and written_at >= spent[2] then
      spent[1] = spent[1] + cost
      redis.call('SET', spent_key(names[at]), cmsgpack.pack(spent), 'KEEPTTL')
    end
  end
end

local function finish(id, record, state, used)
  if #record[HELD] > 0 then
    hold_money(record[HELD], -record[HELD][1], record[LIFETIME])
  end
  for at = SCOPES, #record, 5 do
    local scope = scope_of(record[at])
    local buckets = {record[at + REQUESTS], record[at + MINUTE], record[at + DAY]}
    if buckets[REQUESTS] ~= 0 and used == RELEASED then
      give_back(scope, REQUESTS, buckets[REQUESTS], 1)
    end
    for unit = MINUTE, DAY do
      if buckets[unit] ~= 0 then
        correct(scope, unit, buckets[unit], record[RESERVED], used)
      end
    end
    if record[at + RUNNING] == 1 then
      redis.call('ZREM', scope.running, id)
    end
  end
  redis.call('SET', reservation_key(id), state, 'PX', ask[REMEMBERED_MS])
  redis.call('ZREM', leases, id)
  if state == 'expired' then
    lose(id)
  elseif record[NOTED] == 1 then
    redis.call('DEL', note_key(id))
  end
end

-- The record of a held reservation, or nil and the state that it is in.
local function load(id)
  local raw = redis.call('GET', reservation_key(id))
  if not raw then
    return nil, 'unknown'
  elseif ENDS[raw] then
    return nil, raw
  end
  local is_right, record = pcall(cmsgpack.unpack, raw)
  if is_right and type(record) == 'table' and type(record[LEASE_END]) == 'number' then
    return record, 'held'
  end
  return nil, 'unknown'
end

-- By a clock that stepped back no lease may end later than one that begins now.
local function shorten_leases()
  local latest = now + ask[LEASE_MS]
  local ids = redis.call('ZRANGEBYSCORE', leases, '(' .. latest, '+inf', 'LIMIT', 0, MAX_SWEPT)
  for _, id in ipairs(ids) do
    redis.call('ZADD', leases, latest, id)
    local record = load(id)
    if record then
      record[LEASE_END] = latest
      redis.call('SET', reservation_key(id), cmsgpack.pack(record), 'KEEPTTL')
      for at = SCOPES, #record, 5 do
        if record[at + RUNNING] == 1 then
          redis.call('ZADD', scope_of(record[at]).running, latest, id)
        end
      end
    end
  end
end

local function sweep()
  shorten_leases()
  local ids = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, MAX_SWEPT)
  for _, id in ipairs(ids) do
    local record = load(id)
    if record then
      finish(id, record, 'expired', record[PROGRESS])
    else
      redis.call('ZREM', leases, id)
      lose(id)
    end
  end
  return #ids
end

-- As `load`, and ended if its lease is over. Not left to the sweep, whose work is bounded.
local function held_record(id)
  local record, state = load(id)
  if record and record[LEASE_END] <= now then
    finish(id, record, 'expired', record[PROGRESS])
    return nil, 'expired'
  end
  return record, state
end

local function running_of(limit)
  local key = limit.scope.running
  local running = redis.call('ZCARD', key)
  -- Those whose lease is over were swept, unless there were too many or their record is lost.
  if running >= limit.max or num_swept == MAX_SWEPT then
    redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
    running = redis.call('ZCARD', key)
  end
  return running
end

local function used_of(limit)
  if limit.unit == RUNNING then
    return running_of(limit)
  end
  roll(limit.scope, limit.unit)
  return limit.scope.windows[4 * limit.unit - 4 + TOTAL]
end

local function wait_of(limit)
  local excess = limit.used + limit.amount - limit.max
  if limit.amount > limit.max or limit.max == 0 then
    return NEVER
  elseif excess <= 0 then
    return 0
  elseif limit.unit == RUNNING then
    return 1
  end
  return wait_for(limit.scope, limit.unit, excess)
end

local function reset_of(limit)
  if limit.unit == RUNNING then
    local last = redis.call('ZRANGE', limit.scope.running, -1, -1, 'WITHSCORES')
    return last[2] and math.max(0, tonumber(last[2]) - now) or 0
  end
  local newest = limit.scope.windows[4 * limit.unit - 4 + NEWEST]
  return newest ~= 0 and time_left(newest, limit.unit) or 0
end

local function read_limits(is_asked_only)
  local limits, tokens = {}, ask[TOKENS]
  for at = LIMITS, #ask, 4 do
    local unit = ask[at + 1]
    local amount = (unit == MINUTE or unit == DAY) and tokens or 1
    local limit = {
      scope = scope_of(ask[at]), unit = unit, amount = is_asked_only and 0 or amount,
      max = ask[at + 2], is_enforced = ask[at + 3] == 1,
    }
    limit.used = used_of(limit)
    limit.wait = wait_of(limit)
    limits[#limits + 1] = limit
  end
  return limits
end

-- Remembered until every window that it was taken from has passed: after that there is nothing to give back.
local function save(id, record)
  redis.call('SET', reservation_key(id), cmsgpack.pack(record), 'PX', record[LIFETIME])
  redis.call('ZADD', leases, record[LEASE_END], id)
  keep(leases, record[NOTED] == 1 and NOTED_MS or record[LIFETIME])
end

local function take_all(limits)
  local lease_end, lifetime = now + ask[LEASE_MS], ask[REMEMBERED_MS]
  local record, places = {lease_end, ask[TOKENS], 0, 0, 0, {}}, {}
  for _, limit in ipairs(limits) do
    local scope, unit = limit.scope, limit.unit
    local place = places[scope.name]
    if not place then
      place = #record + 1
      places[scope.name], record[place] = place, scope.name
      for unit_of_scope = REQUESTS, RUNNING do
        record[place + unit_of_scope] = 0
      end
    end
    if unit == RUNNING then
      redis.call('ZADD', scope.running, lease_end, ask[ID])
      keep(scope.running, ask[LEASE_MS])
      record[place + RUNNING] = 1
      limit.reset = ask[LEASE_MS]
    else
      record[place + unit] = take(scope, unit, limit.amount)
      lifetime = math.max(lifetime, span_ms(unit))
    end
    limit.used = limit.used + limit.amount
  end
  record[LIFETIME] = lifetime + ask[LEASE_MS]
  local money = ask[MONEY]
  if #money > 0 then
    record[HELD][1] = money[1]
    for at = 2, #money, 3 do
      table.insert(record[HELD], money[at])
    end
    hold_money(record[HELD], money[1], record[LIFETIME])
  end
  if ask[NOTE] ~= '' then
    record[NOTED] = 1
    redis.call('HSET', note_key(ask[ID]), 'note', ask[NOTE])
    redis.call('PEXPIRE', note_key(ask[ID]), NOTED_MS)
  end
  save(ask[ID], record)
end

-- Spent and held of each budget, and whether it admits the cost; nil where nobody has said what is spent.
local function read_budgets(money)
  local reply, is_admitted = {}, true
  for at = 2, #money, 3 do
    local name, max, effect = money[at], money[at + 1], money[at + 2]
    local spent, held = spent_of(name), number_at(held_key(name))
    if not spent and effect ~= COUNTS then
      return nil
    end
    local known = spent and spent[1] or 0
    if effect == REFUSES and known + held + money[1] > max then
      is_admitted = false
    end
    table.insert(reply, known)
    table.insert(reply, held)
  end
  return reply, is_admitted
end

local function seed()
  for at = LIMITS, #ask, 3 do
    redis.call('SET', spent_key(ask[at]), cmsgpack.pack({ask[at + 1], ask[at + 2]}), 'PX', SPENT_MS, 'NX')
  end
  return {now}
end

-- What the caller is told: now, how it ended, used, reset and wait of each limit, and of each budget what is
-- spent and held.
local function reserve(is_asked_only)
  local verdict, record = 'peeked', nil
  if not is_asked_only then
    record, verdict = held_record(ask[ID])
  end
  local budgets, is_affordable = read_budgets(ask[MONEY])
  if not budgets and verdict == 'unknown' then
    return {now, 'unseeded'}
  end
  local limits = read_limits(is_asked_only)
  if verdict == 'unknown' then
    verdict = is_affordable and 'admitted' or 'refused'
    for _, limit in ipairs(limits) do
      if limit.is_enforced and limit.wait ~= 0 then
        verdict = 'refused'
      end
    end
  end
  if verdict == 'admitted' then
    take_all(limits)
  end
  local reply = {now, verdict}
  for _, limit in ipairs(limits) do
    local at = #reply
    reply[at + 1], reply[at + 2], reply[at + 3] = limit.used, limit.reset or reset_of(limit), limit.wait
  end
  for _, amount in ipairs(budgets or {}) do
    reply[#reply + 1] = amount
  end
  return reply
end

local function finish_asked(state, used)
  local record, found = held_record(ask[ID])
  if not record then
    return {now, 0, found}
  end
  if state == 'settled' and #ask[MONEY] > 0 then
    spend(record[HELD], ask[MONEY][1], ask[MONEY][2])
  end
  -- Nobody knows what was used: all of it, so that nothing goes back.
  finish(ask[ID], record, state, used or math.max(0, record[RESERVED]))
  return {now, 1, state}
end

local function heartbeat(id, tokens, progress)
  local record, state = held_record(id)
  if not record then
    return 0, state
  end
  record[LEASE_END] = math.max(record[LEASE_END], now + ask[LEASE_MS])
  record[PROGRESS] = math.max(record[PROGRESS], tokens)
  for at = SCOPES, #record, 5 do
    if record[at + RUNNING] == 1 then
      local running = base .. 'running:' .. record[at]
      redis.call('ZADD', running, record[LEASE_END], id)
      keep(running, ask[LEASE_MS])
    end
  end
  if progress ~= '' and record[NOTED] == 1 then
    redis.call('HSET', note_key(id), 'progress', progress)
  end
  save(id, record)
  return 1, 'held'
end

local function heartbeats()
  local reply = {now}
  for at = LIMITS, #ask, 3 do
    reply[#reply + 1], reply[#reply + 2] = heartbeat(ask[at], ask[at + 1], ask[at + 2])
  end
  return reply
end

-- How many leases there are, and of some lost ones id, note and progress.
local function read_lost()
  local reply = {now, redis.call('ZCARD', leases)}
  local found = redis.call('HRANDFIELD', base .. 'lost', MAX_LOST, 'WITHVALUES')
  for at = 1, #found, 2 do
    local is_right, noted = pcall(cmsgpack.unpack, found[at + 1])
    if is_right and type(noted) == 'table' and #noted == 2 then
      reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = found[at], noted[1], noted[2]
    else
      redis.call('HDEL', base .. 'lost', found[at])
    end
  end
  return reply
end

local function forget_lost()
  for at = LIMITS, #ask do
    redis.call('HDEL', base .. 'lost', ask[at])
  end
  return {now}
end

local commands = {
  reserve = function() return reserve(false) end,
  peek = function() return reserve(true) end,
  settle = function() return finish_asked('settled', ask[TOKENS] >= 0 and ask[TOKENS] or nil) end,
  release = function() return finish_asked('released', RELEASED) end,
  heartbeat = heartbeats,
  lost = read_lost,
  forget = forget_lost,
  seed = seed,
  sweep = function() return {now, num_swept, 'swept'} end,
}

-- A key of another type than ours fails every call of its tenant: it goes, so that this call was the last.
local function drop_unless(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then
    redis.call('DEL', key)
  end
end

local function asked_ids()
  local ids = {ask[ID]}
  for at = LIMITS, ask[COMMAND] == 'heartbeat' and #ask or 0, 3 do
    ids[#ids + 1] = ask[at]
  end
  return ids
end

local function drop_damaged()
  drop_unless(leases, 'zset')
  drop_unless(base .. 'lost', 'hash')
  for _, id in ipairs(asked_ids()) do
    drop_unless(reservation_key(id), 'string')
    drop_unless(note_key(id), 'hash')
  end
  for at = 2, ask[COMMAND] == 'reserve' and #ask[MONEY] or 0, 3 do
    drop_unless(spent_key(ask[MONEY][at]), 'string')
    drop_unless(held_key(ask[MONEY][at]), 'string')
  end
  for _, scope in pairs(scopes) do
    drop_unless(scope.key, 'string')
    drop_unless(scope.running, 'zset')
    for unit = REQUESTS, DAY do
      drop_unless(history_of(scope, unit), 'hash')
    end
  end
end

local function carry_out()
  num_swept = sweep()
  local reply = commands[ask[COMMAND]]()
  save_scopes()
  return cmsgpack.pack(reply)
end

local function main(keys, args)
  ask = cmsgpack.unpack(args[1])
  leases, scopes = keys[1], {}
  base = string.sub(leases, 1, -7)
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000) + ask[OFFSET_MS]
  local is_done, answer = pcall(carry_out)
  if is_done then
    return answer
  end
  -- The server's own troubles (no memory, a replica, ...) are everybody's; a value's are this call's alone.
  local fault = type(answer) == 'table' and answer.err or nil
  if fault and not (string.find(fault, '^WRONGTYPE') or string.find(fault, '^ERR')) then
    return redis.error_reply(fault)
  end
  drop_damaged()
  return redis.error_reply('DAMAGED a value of the limits')
end
