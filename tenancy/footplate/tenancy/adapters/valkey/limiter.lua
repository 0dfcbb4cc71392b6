-- Every step of the limiter, for one tenant. Nothing else runs meanwhile: all counters change, or none.
--
-- KEYS  1: the tenant's leases   2: the reservation   3 and on: one counter for each limit
-- ARGV  1: command   2: request id   3: lease, ms   4: how long an ended reservation is remembered, ms
--       5: tokens, -1 for unknown   6: number of limits
--       then six for each limit: unit (r, t or c), amount, max, 1 if enforced, bucket ms, number of buckets
--       and last, from tests only: milliseconds to add to the server's time
--
-- A tenant's keys share one hash tag, so the keys that are made here from the first one are in its slot.
-- A window is a hash: t total, o no bucket is older, n the newest bucket, and an amount for each bucket.
-- Concurrency is a sorted set of request ids by the end of their lease: it heals by itself.
-- A reservation is packed: state, end of lease, tokens reserved, tokens used so far, lifetime, counters; a counter
-- is packed as key, unit, amount, bucket, bucket ms, number of buckets.

local MAX_SWEPT = 64
local NEVER = -1
local KEY, UNIT, AMOUNT, BUCKET, BUCKET_MS, NUM_BUCKETS = 1, 2, 3, 4, 5, 6
local STATE, LEASE_END, TOKENS, PROGRESS, LIFETIME, COUNTERS = 1, 2, 3, 4, 5, 6

local command, request_id = ARGV[1], ARGV[2]
local lease_ms, remembered_ms, tokens = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local num_limits = tonumber(ARGV[6])
local leases, base = KEYS[1], string.sub(KEYS[1], 1, -7)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[7 + 6 * num_limits] or 0)

local function reservation_key(id)
  return base .. 'reservation:' .. id
end

-- A key outlives the longest need that anybody had of it; by a quarter, so that most calls only look.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, math.floor(ms * 1.25))
  end
end

local function amounts_between(key, first, last)
  local fields = {}
  for bucket = first, last do
    fields[#fields + 1] = bucket
  end
  return redis.call('HMGET', key, unpack(fields)), fields
end

-- The window at this moment, buckets that have left it dropped.
local function read_window(key, bucket_ms, num_buckets)
  local bucket = math.floor(now / bucket_ms)
  local head = redis.call('HMGET', key, 't', 'o', 'n', bucket)
  local newest = tonumber(head[3])
  if not newest then
    return {total = 0, bucket = bucket, oldest = bucket, amount = 0}
  end
  -- After a fail-over the clock may be behind: what was taken must not be forgotten for that.
  if newest > bucket then
    bucket = newest
    head[4] = redis.call('HGET', key, bucket)
  end
  local first = bucket - num_buckets
  if newest < first then
    redis.call('DEL', key)
    return {total = 0, bucket = bucket, oldest = bucket, amount = 0}
  end
  local total, oldest = tonumber(head[1]), tonumber(head[2])
  if oldest < first then
    local amounts, fields = amounts_between(key, oldest, first - 1)
    for i = 1, #fields do
      total = total - (tonumber(amounts[i]) or 0)
    end
    redis.call('HDEL', key, unpack(fields))
    redis.call('HSET', key, 't', total, 'o', first)
    oldest = first
  end
  return {total = total, bucket = bucket, oldest = oldest, newest = newest, amount = tonumber(head[4]) or 0}
end

local function end_of(bucket, bucket_ms, num_buckets)
  return (bucket + num_buckets + 1) * bucket_ms
end

local function window_take(key, window, amount, bucket_ms, num_buckets)
  if amount == 0 then
    return
  end
  window.total = window.total + amount
  window.newest = window.bucket
  redis.call(
    'HSET', key, window.bucket, window.amount + amount, 't', window.total, 'o', window.oldest, 'n', window.bucket
  )
  keep(key, (num_buckets + 2) * bucket_ms)
end

local function newest_bucket(key)
  local newest = 0
  for _, field in ipairs(redis.call('HKEYS', key)) do
    newest = math.max(newest, tonumber(field) or 0)
  end
  return newest
end

-- Give back to the bucket that it was taken from. If that has left the window it is gone, and holds nothing.
local function window_give_back(counter, amount)
  local key, bucket = counter[KEY], counter[BUCKET]
  local window = read_window(key, counter[BUCKET_MS], counter[NUM_BUCKETS])
  if not window.newest then
    return
  end
  local held = tonumber(redis.call('HGET', key, bucket)) or 0
  amount = math.min(amount, held)
  local total = window.total - amount
  if total == 0 then
    redis.call('DEL', key)
    return
  end
  redis.call('HSET', key, bucket, held - amount, 't', total)
  if amount == held then
    redis.call('HDEL', key, bucket)
    if bucket == window.newest then
      redis.call('HSET', key, 'n', newest_bucket(key))
    end
  end
end

-- Until enough of the oldest buckets have left for an excess to fit.
local function window_wait(key, window, excess, bucket_ms, num_buckets)
  local amounts, fields = amounts_between(key, window.oldest, window.newest)
  for i = 1, #fields do
    excess = excess - (tonumber(amounts[i]) or 0)
    if excess <= 0 then
      return end_of(fields[i], bucket_ms, num_buckets) - now
    end
  end
  return NEVER
end

local function load(id)
  local raw = redis.call('GET', reservation_key(id))
  return raw and cmsgpack.unpack(raw)
end

-- Release gives all back. Settling and expiry correct the tokens to what was used; the request was made.
local function give_back(id, record, used)
  for _, counter in ipairs(record[COUNTERS]) do
    if counter[UNIT] == 'c' then
      redis.call('ZREM', counter[KEY], id)
    elseif counter[UNIT] == 't' and used > counter[AMOUNT] then
      -- Charged now: the bucket of the reservation may have left the window, and with it the charge.
      local window = read_window(counter[KEY], counter[BUCKET_MS], counter[NUM_BUCKETS])
      window_take(counter[KEY], window, used - counter[AMOUNT], counter[BUCKET_MS], counter[NUM_BUCKETS])
    elseif counter[UNIT] == 't' and used < counter[AMOUNT] then
      window_give_back(counter, counter[AMOUNT] - math.max(used, 0))
    elseif counter[UNIT] == 'r' and used < 0 then
      window_give_back(counter, counter[AMOUNT])
    end
  end
end

local RELEASED = -1

local function finish(id, record, state, used)
  give_back(id, record, used)
  redis.call('SET', reservation_key(id), cmsgpack.pack({state}), 'PX', remembered_ms)
  redis.call('ZREM', leases, id)
end

local function sweep()
  local ids = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, MAX_SWEPT)
  for _, id in ipairs(ids) do
    local record = load(id)
    if record and record[STATE] == 'held' then
      finish(id, record, 'expired', record[PROGRESS])
    else
      redis.call('ZREM', leases, id)
    end
  end
  return #ids
end

-- The record while it is held; else the state that it is in. Not left to the sweep, whose work is bounded.
local function held_record(id)
  local record = load(id)
  if not record then
    return nil, 'unknown'
  end
  if record[STATE] == 'held' and record[LEASE_END] <= now then
    finish(id, record, 'expired', record[PROGRESS])
    return nil, 'expired'
  end
  if record[STATE] ~= 'held' then
    return nil, record[STATE]
  end
  return record, 'held'
end

local function limit_at(i)
  local at = 6 + 6 * (i - 1)
  return {
    key = KEYS[2 + i], unit = ARGV[at + 1], amount = tonumber(ARGV[at + 2]), max = tonumber(ARGV[at + 3]),
    enforced = ARGV[at + 4] == '1', bucket_ms = tonumber(ARGV[at + 5]), num_buckets = tonumber(ARGV[at + 6]),
  }
end

-- Fills in what is used and how long the amount must wait.
local function check(limit)
  if limit.unit == 'c' then
    redis.call('ZREMRANGEBYSCORE', limit.key, '-inf', now)
    limit.used = redis.call('ZCARD', limit.key)
  else
    limit.window = read_window(limit.key, limit.bucket_ms, limit.num_buckets)
    limit.used = limit.window.total
  end
  local excess = limit.used + limit.amount - limit.max
  if limit.amount > limit.max or limit.max == 0 then
    limit.wait = NEVER
  elseif excess <= 0 then
    limit.wait = 0
  elseif limit.unit == 'c' then
    limit.wait = 1
  else
    limit.wait = window_wait(limit.key, limit.window, excess, limit.bucket_ms, limit.num_buckets)
  end
end

local function reset_of(limit)
  if limit.unit == 'c' then
    local last = redis.call('ZRANGE', limit.key, -1, -1, 'WITHSCORES')
    return last[2] and tonumber(last[2]) - now or 0
  end
  local newest = limit.window.newest
  return newest and limit.used > 0 and end_of(newest, limit.bucket_ms, limit.num_buckets) - now or 0
end

local function take(limit, lease_end)
  if limit.unit == 'c' then
    redis.call('ZADD', limit.key, lease_end, request_id)
    keep(limit.key, lease_ms)
  else
    window_take(limit.key, limit.window, limit.amount, limit.bucket_ms, limit.num_buckets)
  end
  limit.used = limit.used + limit.amount
  local bucket = limit.window and limit.window.bucket or 0
  return {limit.key, limit.unit, limit.amount, bucket, limit.bucket_ms, limit.num_buckets}
end

-- Remembered until every window that it was taken from has passed: after that there is nothing to give back.
local function save(record)
  redis.call('SET', KEYS[2], cmsgpack.pack(record), 'PX', record[LIFETIME])
  redis.call('ZADD', leases, record[LEASE_END], request_id)
  keep(leases, record[LIFETIME])
end

local function take_all(limits)
  local lease_end, lifetime, counters = now + lease_ms, remembered_ms, {}
  for i, limit in ipairs(limits) do
    counters[i] = take(limit, lease_end)
    lifetime = math.max(lifetime, (limit.num_buckets + 2) * limit.bucket_ms)
  end
  save({'held', lease_end, tokens, 0, lifetime + lease_ms, counters})
end

-- What the caller is told: now, how it ended, and used, reset and wait of each limit.
local function reserve(is_asked_only)
  local limits, verdict = {}, is_asked_only and 'peeked' or 'admitted'
  local record, state = nil, 'unknown'
  if not is_asked_only then
    record, state = held_record(request_id)
  end
  for i = 1, num_limits do
    limits[i] = limit_at(i)
    check(limits[i])
    if limits[i].enforced and limits[i].wait ~= 0 and not is_asked_only then
      verdict = 'refused'
    end
  end
  if state ~= 'unknown' then
    verdict = state
  elseif verdict == 'admitted' then
    take_all(limits)
  end
  local reply = {now, verdict}
  for _, limit in ipairs(limits) do
    reply[#reply + 1] = limit.used
    reply[#reply + 1] = reset_of(limit)
    reply[#reply + 1] = limit.wait
  end
  return reply
end

local function settle()
  local record, state = held_record(request_id)
  if not record then
    return {now, 0, state}
  end
  -- Nobody knows what was used: all of it, so that nothing goes back.
  finish(request_id, record, 'settled', math.max(0, tokens < 0 and record[TOKENS] or tokens))
  return {now, 1, 'settled'}
end

local function release()
  local record, state = held_record(request_id)
  if not record then
    return {now, 0, state}
  end
  finish(request_id, record, 'released', RELEASED)
  return {now, 1, 'released'}
end

local function heartbeat()
  local record, state = held_record(request_id)
  if not record then
    return {now, 0, state}
  end
  record[LEASE_END] = math.max(record[LEASE_END], now + lease_ms)
  record[PROGRESS] = math.max(record[PROGRESS], tokens)
  for _, counter in ipairs(record[COUNTERS]) do
    if counter[UNIT] == 'c' then
      redis.call('ZADD', counter[KEY], record[LEASE_END], request_id)
      keep(counter[KEY], lease_ms)
    end
  end
  save(record)
  return {now, 1, 'held'}
end

local num_swept = sweep()
if command == 'reserve' then
  return reserve(false)
elseif command == 'peek' then
  return reserve(true)
elseif command == 'settle' then
  return settle()
elseif command == 'release' then
  return release()
elseif command == 'heartbeat' then
  return heartbeat()
end
return {now, num_swept, 'swept'}
