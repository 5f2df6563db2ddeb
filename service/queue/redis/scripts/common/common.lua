-- The jobs. Part of every script.
--
-- KEYS[1..9] QUEUE of keys.py
-- KEYS[2] hash: job -> state, a msgpack map:
--   feed, log, deadline    keys; queue time, Unix seconds
--   queue, entry           absent while claimed
--   attempts, told         claims; last event at the last claim
--   deaths, deaths_in_all  engine deaths in flight since its last progress; in total
--   first_death            number of the first of `deaths` among all
--   near                   1: an engine died shortly before that, without it
--   others                 deaths without it since, and `near`
--   cancel, cause          reason of a cancel while claimed; of the last death
--   tenant, cost           tokens, estimated
--   prompt, branches       tokens; sequences
--   stops                  list of "<branch> <reason>"
-- ARGV[1..8] BOUNDS of link.py
-- last ARGV  monotonic seconds since the caller's last answered script; '' for a new caller

local JOBS, STATES, CLAIMS, DEADLINES, WAITING, RETURNED, SUSPECTS, LEASES, EPOCH = unpack(KEYS, 1, 9)
local FEED_ENTRIES, FEED_LIFE_S, RUNNING_LIFE_S, ENDED_LIFE_S = unpack(ARGV, 1, 4)
local SUSPECT_AFTER_DEATHS, MAX_DEATHS, MAX_DEATHS_IN_ALL = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local PROGRESS_EVENTS = tonumber(ARGV[8])

-- Advance queue time: Redis' clock without its jumps (NTP, failover). It advances by at most the caller's elapsed time,
-- never back, and converges by up to SLEW. For a new caller all of Redis' time has passed.
local CLOCK, SLACK_S, SLEW, STORE_EVERY_S = EPOCH .. ':clock', 1, 0.05, 0.1
local function tick()
  local time = redis.call('TIME')
  local wall, known = tonumber(time[1]) + tonumber(time[2]) / 1e6, redis.call('HMGET', CLOCK, 'wall', 'queue')
  local now = wall
  if known[1] and known[2] then
    local elapsed = tonumber(ARGV[#ARGV])
    local most = elapsed and elapsed + SLACK_S or math.huge
    local passed = math.min(math.max(wall - tonumber(known[1]), 0), most)
    now = tonumber(known[2]) + passed
    now = now + math.max(-SLEW * passed, math.min(SLEW * passed, wall - now))
    if math.abs(wall - tonumber(known[1])) < STORE_EVERY_S then return now end
  end
  -- Fails when out of memory: a later script stores it.
  redis.pcall('HSET', CLOCK, 'wall', string.format('%.6f', wall), 'queue', string.format('%.6f', now))
  return now
end
local NOW_S = tick()
local function now_s() return NOW_S end

local function read_state(job)
  local packed = redis.call('HGET', STATES, job)
  return packed and cmsgpack.unpack(packed) or nil
end

local function write_state(job, state)
  redis.call('HSET', STATES, job, cmsgpack.pack(state))
end

local function send(feed, messages)
  local count = #messages
  local high, low = math.floor(count / 256), count % 256
  local head = count < 16 and string.char(0x90 + count) or string.char(0xdc, high, low)
  redis.call('XADD', feed, 'MAXLEN', '~', FEED_ENTRIES, '*', 'm', head .. table.concat(messages))
  redis.call('EXPIRE', feed, FEED_LIFE_S)
end

local function enqueue(job, state, queue)
  state.queue, state.entry = queue, redis.call('XADD', queue, '*', 'm', job)
  if queue == WAITING then add_waiting(job, state, now_s()) end
  write_state(job, state)
end

local function leave_queue(job, state)
  if state.entry then redis.call('XDEL', state.queue, state.entry) end
  if state.queue == WAITING then remove_waiting(job, state) end
  state.queue, state.entry = nil, nil
end

local function drop_job(job)
  redis.call('HDEL', JOBS, job)
  redis.call('HDEL', STATES, job)
  redis.call('HDEL', CLAIMS, job)
  redis.call('ZREM', DEADLINES, job)
end

local function last_entry(log)
  return redis.call('XREVRANGE', log, '+', '-', 'COUNT', '1')[1]
end

local function has_ended(entry)
  return entry and #entry[2] > 2
end

local function last_number(log)
  local last = last_entry(log)
  return last and tonumber(string.match(last[1], '^%d+')) or 0
end

-- A job that crashes engines makes no progress. If engines also die without it, it is only blamed after another death
-- while running alone.
local function is_deadly(state)
  local enough = (state.others or 0) > 0 and MAX_DEATHS + 1 or MAX_DEATHS
  return state.deaths >= enough or state.deaths_in_all >= MAX_DEATHS_IN_ALL
end

local function is_recurrent(state)
  return state.deaths_in_all >= MAX_DEATHS_IN_ALL - 2
end

local function is_suspect(state)
  return state.deaths >= SUSPECT_AFTER_DEATHS or is_recurrent(state)
end

-- Its usage is 0: only the log has its tokens.
local function end_job(job, state, reason)
  local last = last_entry(state.log)
  if not has_ended(last) then
    local number = last_number(state.log) + 1
    local usage = {prompt_tokens = 0, completion_tokens = 0}
    local message = cmsgpack.pack({v = 1, job_id = job, number = number, ['end'] = reason, usage = usage})
    redis.call('XADD', state.log, number .. '-0', 'm', message, 'end', reason)
    redis.call('EXPIRE', state.log, ENDED_LIFE_S)
    send(state.feed, {message})
  end
  leave_queue(job, state)
  drop_job(job)
end

-- `near`: 1 if another death came up to `near_s` before.
local function count_death(key, near_s)
  local now, last_s = now_s(), tonumber(redis.call('HGET', key, 'last_s') or '-inf')
  local number = (tonumber(redis.call('HGET', key, 'num') or '0')) + 1
  redis.call('HSET', key, 'num', number, 'last_s', now)
  return {number = number, near = now - last_s < near_s and 1 or 0}
end

local function put_back(job, state, cause, death)
  redis.call('HDEL', CLAIMS, job)
  if not state then return drop_job(job) end
  if state.cancel then return end_job(job, state, state.cancel) end
  if last_number(state.log) >= state.told + PROGRESS_EVENTS then state.deaths = 0 end
  if cause then
    if state.deaths == 0 then state.first_death, state.near = death.number, death.near end
    state.deaths = state.deaths + 1
    state.others = (state.near or 0) + death.number - (state.first_death or death.number) + 1 - state.deaths
    state.deaths_in_all = state.deaths_in_all + 1
    state.cause = cause
  end
  enqueue(job, state, is_suspect(state) and not is_deadly(state) and SUSPECTS or RETURNED)
end

