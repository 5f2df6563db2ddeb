-- Stands before every script of the queue: its keys, and what happens to a job in more than one of them.
--
-- KEYS[1]  {quire}:jobs       hash, job id -> Job message, from acceptance to the end
-- KEYS[2]  {quire}:states     hash, job id -> state, a msgpack map as long as the job is there:
--            feed, log, deadline    where its events go; queue time, Unix seconds
--            queue, entry           where it waits; both absent while it is claimed
--            attempts, told         how often it was claimed; the last event in its log at the last claim
--            deaths, deaths_in_all  engine deaths while it was in flight, since it last got on; from the beginning
--            first_death            which of all engine deaths the first of `deaths` was
--            near                   1: another engine died shortly before that, without it
--            others                 engines that died since then or shortly before without it
--            cancel                 why it is no longer wanted, though it was claimed when that was said
--            cause                  what the last of those deaths was
--            tenant, cost           whose it is; tokens that it may cost
--            prompt, branches       tokens of its prompt; sequences that it takes
--            lane, priority         how it waits (see fair.lua)
--            stops                  list of "<branch> <reason>": branches that are no longer wanted
-- KEYS[3]  {quire}:claims     hash, job id -> fence "<attempt> <owner>", while it is claimed
-- KEYS[4]  {quire}:deadlines  sorted set, job ids by deadline
-- KEYS[5]  {quire}:waiting    stream, ids of accepted jobs
-- KEYS[6]  {quire}:returned   stream, ids of jobs that were claimed before
-- KEYS[7]  {quire}:suspects   stream, ids of jobs that run alone
-- KEYS[8]  {quire}:leases     sorted set, workers by the queue time their lease runs out
-- KEYS[9]  {quire}:epoch      string, made with the data and lost with them
-- ARGV[1] longest feed (entries)      ARGV[2] feed's life (s)
-- ARGV[3] life of a log without news (s)   ARGV[4] life of a log after the end (s)
-- ARGV[5] deaths that make a suspect   ARGV[6] deaths that are enough   ARGV[7] deaths in all that are enough
-- ARGV[8] events by which a job gets on
-- last ARGV  seconds since the caller's last script was answered, by a clock that is never set; '' for a new caller
-- {quire}:epoch:clock         hash, the queue's clock: wall, what Redis' clock said; queue, what time that was (see now_s)
-- The keys of a job's feed and log are taken from its state where a script learns only here which job it is about.

local JOBS, STATES, CLAIMS, DEADLINES, WAITING, RETURNED, SUSPECTS, LEASES, EPOCH = unpack(KEYS, 1, 9)
local FEED_ENTRIES, FEED_LIFE_S, RUNNING_LIFE_S, ENDED_LIFE_S = unpack(ARGV, 1, 4)
local SUSPECT_AFTER_DEATHS, MAX_DEATHS, MAX_DEATHS_IN_ALL = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local PROGRESS_EVENTS = tonumber(ARGV[8])

-- The queue's clock: Redis' own, without its jumps. It is set by NTP, and may be an hour off after a failover; deadlines,
-- leases and the order of jobs must not move with it. Every script moves the clock on, by no more than what has passed on the
-- caller's own clock, and not back. The difference is made up for by going up to SLEW faster or slower. Where nobody was
-- there, as far as the caller knows, all that Redis' clock says has passed.
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
  -- Refused where memory is short: then the clock is moved on by a later script.
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

-- The messages become one, a msgpack list: who reads it wants to build them in one go.
local function tell(feed, messages)
  local count = #messages
  local high, low = math.floor(count / 256), count % 256
  local head = count < 16 and string.char(0x90 + count) or string.char(0xdc, high, low)
  redis.call('XADD', feed, 'MAXLEN', '~', FEED_ENTRIES, '*', 'm', head .. table.concat(messages))
  redis.call('EXPIRE', feed, FEED_LIFE_S)
end

local function enqueue(job, state, queue)
  state.queue, state.entry = queue, redis.call('XADD', queue, '*', 'm', job)
  if queue == WAITING then shelve(job, state, now_s()) end
  write_state(job, state)
end

local function leave_queue(job, state)
  if state.entry then redis.call('XDEL', state.queue, state.entry) end
  if state.queue == WAITING then unshelve(job, state) end
  state.queue, state.entry = nil, nil
end

local function forget(job)
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

-- A job that kills engines is told from those that were near by what it tells in between: it gets no further. Where
-- engines die without it too, there is another cause about, and it takes a second death alone to lay them to its charge.
local function is_deadly(state)
  local enough = (state.others or 0) > 0 and MAX_DEATHS + 1 or MAX_DEATHS
  return state.deaths >= enough or state.deaths_in_all >= MAX_DEATHS_IN_ALL
end

-- It is to run alone until it gets on, or to its end where it got on before and engines died of it all the same.
local function is_recurrent(state)
  return state.deaths_in_all >= MAX_DEATHS_IN_ALL - 2
end

local function is_suspect(state)
  return state.deaths >= SUSPECT_AFTER_DEATHS or is_recurrent(state)
end

-- Ends a job that no engine has. Of its tokens nobody here knows more than its log.
local function end_job(job, state, reason)
  local last = last_entry(state.log)
  if not has_ended(last) then
    local number = last_number(state.log) + 1
    local usage = {prompt_tokens = 0, completion_tokens = 0}
    local message = cmsgpack.pack({v = 1, job_id = job, number = number, ['end'] = reason, usage = usage})
    redis.call('XADD', state.log, number .. '-0', 'm', message, 'end', reason)
    redis.call('EXPIRE', state.log, ENDED_LIFE_S)
    tell(state.feed, {message})
  end
  leave_queue(job, state)
  forget(job)
end

-- An engine has died: which of all engine deaths it is, and whether (1 or 0) another came up to `near_s` before.
local function count_death(key, near_s)
  local now, last_s = now_s(), tonumber(redis.call('HGET', key, 'last_s') or '-inf')
  local number = (tonumber(redis.call('HGET', key, 'num') or '0')) + 1
  redis.call('HSET', key, 'num', number, 'last_s', now)
  return {number = number, near = now - last_s < near_s and 1 or 0}
end

-- Takes a claimed job from its worker and queues it where it belongs, before all that was never claimed.
-- `cause` is what the engine died of that had it in flight, and `death` that death as it was counted; nil: it was given
-- back in peace.
local function put_back(job, state, cause, death)
  redis.call('HDEL', CLAIMS, job)
  if not state then return forget(job) end
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

