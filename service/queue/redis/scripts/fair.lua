-- Stands before every script of the queue: which of the waiting jobs is next.
--
-- Tenants take turns by the tokens that their jobs cost. A tenant's virtual time is what it was served so far; who was
-- served least is next, and one who was away is put at the clock, so that nobody saves up turns. A job counts for what it
-- may cost when it is claimed, and for what it did cost from its end on. A tenant's own jobs go by
-- rank: the second of their arrival, later or earlier by AGE_S for each step of priority, so that none waits for ever.
-- The lane `batch` is served when no other job waits, or by turns as well once its next job is BATCH_AGE_S old.
--
-- {quire}:waiting:lane:<lane>           sorted set, tenants with jobs in the lane by virtual time
-- {quire}:waiting:jobs:<lane>:<tenant>  sorted set, a tenant's waiting jobs by rank
-- {quire}:waiting:since:<lane>          sorted set, waiting jobs by the second of their arrival
-- {quire}:waiting:times                 hash, tenant -> virtual time, where it is ahead of the clock; '' -> the clock
-- {quire}:waiting:tokens                hash, tenant -> tokens that its waiting jobs cost; '' -> those of all

local LANES, AGE_S, BATCH_AGE_S = {'normal', 'batch'}, 10, 60
local BACKLOG = KEYS[5]  -- {quire}:waiting
local LANE, LANE_JOBS, TIMES, TOKENS = BACKLOG .. ':lane:', BACKLOG .. ':jobs:', BACKLOG .. ':times', BACKLOG .. ':tokens'
local SINCE = BACKLOG .. ':since:'

local function whole(number) return string.format('%.0f', number) end

local function lane_jobs(state) return LANE_JOBS .. state.lane .. ':' .. state.tenant end

local function virtual_time(tenant)
  local times = redis.call('HMGET', TIMES, '', tenant)
  return math.max(tonumber(times[1] or '0'), tonumber(times[2] or '0'))
end

local function count_tokens(tenant, tokens)
  for _, whose in ipairs({tenant, ''}) do
    if redis.call('HINCRBY', TOKENS, whose, whole(tokens)) <= 0 then redis.call('HDEL', TOKENS, whose) end
  end
end

local function shelve(job, state, now)
  -- What a script of another version claimed or put there, it has told nobody of in the times of arrival.
  if redis.call('EXISTS', LANE .. state.lane) == 0 then redis.call('DEL', SINCE .. state.lane) end
  redis.call('ZADD', lane_jobs(state), string.format('%.6f', now + state.priority * AGE_S), job)
  redis.call('ZADD', SINCE .. state.lane, string.format('%.6f', now), job)
  redis.call('ZADD', LANE .. state.lane, 'NX', whole(virtual_time(state.tenant)), state.tenant)
  count_tokens(state.tenant, state.cost)
end

local function unshelve(job, state)
  if not state.lane or redis.call('ZREM', lane_jobs(state), job) == 0 then return end
  redis.call('ZREM', SINCE .. state.lane, job)
  if redis.call('EXISTS', lane_jobs(state)) == 0 then redis.call('ZREM', LANE .. state.lane, state.tenant) end
  count_tokens(state.tenant, -state.cost)
end

-- The job has been served: its tenant's turn is over.
local function charge(state)
  local start = virtual_time(state.tenant)
  local ahead = whole(start + state.cost)
  redis.call('HSET', TIMES, '', whole(start), state.tenant, ahead)
  for _, lane in ipairs(LANES) do redis.call('ZADD', LANE .. lane, 'XX', ahead, state.tenant) end
end

-- The job has ended, with so many tokens: they count instead of what it might have cost.
local function settle(state, num_tokens)
  local times = redis.call('HMGET', TIMES, '', state.tenant)
  if not times[2] then return end
  local at = tonumber(times[2]) + num_tokens - state.cost
  redis.call('HSET', TIMES, state.tenant, whole(at))
  at = whole(math.max(at, tonumber(times[1] or '0')))
  for _, lane in ipairs(LANES) do redis.call('ZADD', LANE .. lane, 'XX', at, state.tenant) end
end

-- Who is next in a lane, and at which virtual time. `but`: set of tenants that are passed over, `but_count` their number.
local function first_of(lane, but, but_count)
  local turns = redis.call('ZRANGE', LANE .. lane, 0, but_count, 'WITHSCORES')
  for i = 1, #turns, 2 do
    if not but[turns[i]] then return turns[i], turns[i + 1] end
  end
end

-- The next job in these lanes; nil where none waits.
local function next_job(now, lanes, but, but_count)
  local best
  for _, lane in ipairs(lanes) do
    local tenant, at = first_of(lane, but, but_count)
    if tenant then
      local job, rank = unpack(redis.call('ZRANGE', LANE_JOBS .. lane .. ':' .. tenant, 0, 0, 'WITHSCORES'))
      at, rank = tonumber(at), tonumber(rank)
      local is_aged = now - rank >= BATCH_AGE_S
      if not best or (is_aged and (at < best.at or (at == best.at and rank < best.rank))) then
        best = {job = job, at = at, rank = rank}
      end
    end
  end
  return best and best.job
end

-- How many of the tenant's own jobs go before this one, from 0; nil for one that does not wait.
local function place(job, state)
  return state.lane and redis.call('ZRANK', lane_jobs(state), job) or nil
end

-- The answer of `submit` where a job that would wait finds no room; nil where it does. One that would wait alone has room.
local function no_room(state, max_jobs, max_tokens, max_own)
  local function is_over(tokens, bound) return bound ~= '' and tokens > 0 and tokens + state.cost > tonumber(bound) end
  local tokens = redis.call('HMGET', TOKENS, '', state.tenant)
  local of_all, own = tonumber(tokens[1] or '0'), tonumber(tokens[2] or '0')
  if is_over(own, max_own) then
    local num_own = 0
    for _, lane in ipairs(LANES) do
      num_own = num_own + redis.call('ZCARD', LANE_JOBS .. lane .. ':' .. state.tenant)
    end
    return {-2, num_own, own}
  end
  local num_jobs = redis.call('XLEN', BACKLOG)
  if is_over(of_all, max_tokens) or (max_jobs ~= '' and num_jobs >= tonumber(max_jobs)) then
    return {-1, num_jobs, of_all}
  end
end

