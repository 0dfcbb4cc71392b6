-- What the scopes of one tenant have used of their windows. One chunk with limiter.lua, which follows: Python
-- puts the library's head and the constants BUCKET_MS and NUM_BUCKETS, by unit, before this.
--
-- A scope's windows are one packed string, four numbers for each of the units REQUESTS, MINUTE and DAY:
-- total, newest bucket, amount of that bucket, and the bucket that none is older than. Only when a bucket
-- closes does its amount move to the window's history, a hash from bucket to amount. A window of nothing is
-- all zeros.

local CHUNK = 32
local REQUESTS, MINUTE, DAY, RUNNING = 1, 2, 3, 4
local TOTAL, NEWEST, AMOUNT, OLDEST = 1, 2, 3, 4

-- Of the call that runs; `main` sets them anew.
local base, now, scopes

-- A key outlives the longest need that anybody had of it; by a quarter, so that most calls only look.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, math.floor(ms * 1.25))
  end
end

local function span_ms(unit)
  return (NUM_BUCKETS[unit] + 2) * BUCKET_MS[unit]
end

-- Until a bucket has left the window; while the clock is behind, no longer than the window is.
local function time_left(bucket, unit)
  local length = NUM_BUCKETS[unit] + 1
  return math.min((bucket + length) * BUCKET_MS[unit] - now, length * BUCKET_MS[unit])
end

-- What somebody else wrote there counts as nothing, and is written over: it concerns this tenant alone.
local function windows_of(key)
  local raw = redis.call('GET', key)
  local is_right, w
  if raw then
    is_right, w = pcall(cmsgpack.unpack, raw)
    is_right = is_right and type(w) == 'table'
    for at = 1, is_right and 12 or 0 do
      is_right = is_right and type(w[at]) == 'number'
    end
  end
  if is_right then
    return w, false
  end
  return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, raw and true
end

-- Read once a call, however many limits and ended leases meet it; written once at the end.
local function scope_of(name)
  local scope = scopes[name]
  if not scope then
    local key = base .. 'windows:' .. name
    scope = {name = name, key = key, running = base .. 'running:' .. name}
    scopes[name] = scope
    scope.windows, scope.is_changed = windows_of(key)
  end
  return scope
end

local function history_of(scope, unit)
  return scope.key .. ':' .. unit
end

local function save_scopes()
  for _, scope in pairs(scopes) do
    local w = scope.windows
    if scope.is_changed then
      local unit = w[4 * DAY - 4 + NEWEST] ~= 0 and DAY or MINUTE
      if unit == DAY or w[NEWEST] ~= 0 or w[4 + NEWEST] ~= 0 then
        redis.call('SET', scope.key, cmsgpack.pack(w), 'PX', span_ms(unit))
      else
        redis.call('DEL', scope.key)
      end
    end
  end
end

local function set_window(scope, unit, total, newest, amount, oldest)
  local w, at = scope.windows, 4 * unit - 4
  w[at + TOTAL], w[at + NEWEST], w[at + AMOUNT], w[at + OLDEST] = total, newest, amount, oldest
  scope.is_changed = true
end

local function forget_window(scope, unit)
  local w, at = scope.windows, 4 * unit - 4
  if w[at + OLDEST] < w[at + NEWEST] then
    redis.call('DEL', history_of(scope, unit))
  end
  set_window(scope, unit, 0, 0, 0, 0)
end

local function amounts_between(history, first, last)
  local fields = {}
  for bucket = first, last do
    fields[#fields + 1] = bucket
  end
  return redis.call('HMGET', history, unpack(fields)), fields
end

-- Drop what has left the window; the bucket of this moment.
local function roll(scope, unit)
  local w, at = scope.windows, 4 * unit - 4
  local bucket, newest, oldest = math.floor(now / BUCKET_MS[unit]), w[at + NEWEST], w[at + OLDEST]
  -- After a fail-over the clock may be behind: what was taken must not be forgotten for that.
  if newest > bucket + NUM_BUCKETS[unit] then
    -- By more than the window is long: waited for, it would hold for that much longer. It begins anew here.
    local total = w[at + TOTAL]
    forget_window(scope, unit)
    set_window(scope, unit, total, bucket, total, bucket)
    return bucket
  elseif newest >= bucket then
    return newest
  end
  local first = bucket - NUM_BUCKETS[unit]
  if newest == 0 or oldest >= first then
    return bucket
  end
  if newest < first then
    forget_window(scope, unit)
    return bucket
  end
  local last = math.min(first, newest) - 1
  if oldest <= last then
    local history = history_of(scope, unit)
    local amounts, fields = amounts_between(history, oldest, last)
    for i = 1, #fields do
      w[at + TOTAL] = w[at + TOTAL] - (tonumber(amounts[i]) or 0)
    end
    redis.call('HDEL', history, unpack(fields))
    w[at + OLDEST] = last + 1
    scope.is_changed = true
  end
  return bucket
end

local function take(scope, unit, amount)
  local bucket = roll(scope, unit)
  if amount == 0 then
    return bucket
  end
  local w, at = scope.windows, 4 * unit - 4
  local newest = w[at + NEWEST]
  if newest == bucket then
    w[at + AMOUNT] = w[at + AMOUNT] + amount
    w[at + TOTAL] = w[at + TOTAL] + amount
    scope.is_changed = true
  elseif newest == 0 then
    -- A history without its window is what somebody else's deletion left.
    redis.call('DEL', history_of(scope, unit))
    set_window(scope, unit, amount, bucket, amount, bucket)
  else
    local history = history_of(scope, unit)
    redis.call('HSET', history, newest, w[at + AMOUNT])
    keep(history, span_ms(unit))
    -- A history of this alone: whatever else the total holds was deleted by somebody.
    local total = redis.call('HLEN', history) == 1 and w[at + AMOUNT] or w[at + TOTAL]
    set_window(scope, unit, total + amount, bucket, amount, w[at + OLDEST])
  end
  return bucket
end

-- The newest bucket is empty now: the one before it, if any, takes its place.
local function step_back(scope, unit)
  local history, newest = history_of(scope, unit), 0
  for _, field in ipairs(redis.call('HKEYS', history)) do
    newest = math.max(newest, tonumber(field))
  end
  if newest == 0 then
    return forget_window(scope, unit)
  end
  local w, at = scope.windows, 4 * unit - 4
  local amount = tonumber(redis.call('HGET', history, newest))
  redis.call('HDEL', history, newest)
  set_window(scope, unit, w[at + TOTAL], newest, amount, w[at + OLDEST])
end

-- To the bucket that it was taken from. If that has left the window it is gone, and holds nothing.
local function give_back(scope, unit, bucket, amount)
  roll(scope, unit)
  local w, at = scope.windows, 4 * unit - 4
  local newest = w[at + NEWEST]
  if amount == 0 or newest == 0 or bucket > newest or bucket < w[at + OLDEST] then
    return
  end
  scope.is_changed = true
  if bucket == newest then
    amount = math.min(amount, w[at + AMOUNT])
    w[at + AMOUNT] = w[at + AMOUNT] - amount
  else
    local history = history_of(scope, unit)
    local left = redis.pcall('HINCRBY', history, bucket, -amount)
    if type(left) == 'table' then
      -- No number: nobody knows what it held, and it goes.
      left = 0
    end
    if left <= 0 then
      amount = amount + left
      redis.call('HDEL', history, bucket)
    end
  end
  w[at + TOTAL] = w[at + TOTAL] - amount
  if w[at + TOTAL] <= 0 then
    forget_window(scope, unit)
  elseif w[at + AMOUNT] == 0 then
    step_back(scope, unit)
  end
end

-- Until enough of the oldest buckets have left for an excess to fit.
local function wait_for(scope, unit, excess)
  local w, at = scope.windows, 4 * unit - 4
  local newest, history = w[at + NEWEST], history_of(scope, unit)
  for first = w[at + OLDEST], newest - 1, CHUNK do
    local amounts, fields = amounts_between(history, first, math.min(first + CHUNK, newest) - 1)
    for i = 1, #fields do
      excess = excess - (tonumber(amounts[i]) or 0)
      if excess <= 0 then
        return time_left(fields[i], unit)
      end
    end
  end
  return time_left(newest, unit)
end
