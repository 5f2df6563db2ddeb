-- The order of waiting jobs. Part of every script, before common.lua.
--
-- The tenant with the least virtual time, the tokens served so far, is next; an absent tenant is set to the clock. A
-- job costs its estimate when claimed, its actual tokens from its end. A tenant's jobs go by rank: arrival (s), AGE_S
-- later or earlier per priority step, so none starves. Lane `batch` runs when no other job waits, or by turns once its
-- next job is BATCH_AGE_S old.
--
-- {quire}:waiting:lane:<lane>           sorted set: tenants by virtual time
-- {quire}:waiting:jobs:<lane>:<tenant>  sorted set: jobs by rank
-- {quire}:waiting:times                 hash: tenant -> virtual time; '' -> clock
-- {quire}:waiting:prefixes              hash: slot of a prefix (prefixes.py) -> rest of its digest, worker
-- {quire}:waiting:loads                 hash: worker -> "<branches held> <free>" at its last claim

local LANES, AGE_S, BATCH_AGE_S = {'normal', 'batch'}, 10, 60
local BACKLOG = KEYS[5]
local LANE, LANE_JOBS, TIMES, TOKENS = BACKLOG .. ':lane:', BACKLOG .. ':jobs:', BACKLOG .. ':times', BACKLOG .. ':tokens'
local SINCE, PREFIXES, LOADS = BACKLOG .. ':since:', BACKLOG .. ':prefixes', BACKLOG .. ':loads'

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

local function add_waiting(job, state, now)
  -- Older versions do not maintain arrivals.
  if redis.call('EXISTS', LANE .. state.lane) == 0 then redis.call('DEL', SINCE .. state.lane) end
  redis.call('ZADD', lane_jobs(state), string.format('%.6f', now + state.priority * AGE_S), job)
  redis.call('ZADD', SINCE .. state.lane, string.format('%.6f', now), job)
  redis.call('ZADD', LANE .. state.lane, 'NX', whole(virtual_time(state.tenant)), state.tenant)
  count_tokens(state.tenant, state.cost)
end

local function remove_waiting(job, state)
  if not state.lane or redis.call('ZREM', lane_jobs(state), job) == 0 then return end
  redis.call('ZREM', SINCE .. state.lane, job)
  if redis.call('EXISTS', lane_jobs(state)) == 0 then redis.call('ZREM', LANE .. state.lane, state.tenant) end
  count_tokens(state.tenant, -state.cost)
end

local function charge(state)
  local start = virtual_time(state.tenant)
  local ahead = whole(start + state.cost)
  redis.call('HSET', TIMES, '', whole(start), state.tenant, ahead)
  for _, lane in ipairs(LANES) do redis.call('ZADD', LANE .. lane, 'XX', ahead, state.tenant) end
end

local function settle(state, num_tokens)
  local times = redis.call('HMGET', TIMES, '', state.tenant)
  if not times[2] then return end
  local at = tonumber(times[2]) + num_tokens - state.cost
  redis.call('HSET', TIMES, state.tenant, whole(at))
  at = whole(math.max(at, tonumber(times[1] or '0')))
  for _, lane in ipairs(LANES) do redis.call('ZADD', LANE .. lane, 'XX', at, state.tenant) end
end

local function first_of(lane, skipped, num_skipped)
  local turns = redis.call('ZRANGE', LANE .. lane, 0, num_skipped, 'WITHSCORES')
  for i = 1, #turns, 2 do
    if not skipped[turns[i]] then return turns[i], turns[i + 1] end
  end
end

local function next_job(now, lanes, skipped, num_skipped)
  local best
  for _, lane in ipairs(lanes) do
    local tenant, at = first_of(lane, skipped, num_skipped)
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

local function place(job, state)
  return state.lane and redis.call('ZRANK', lane_jobs(state), job) or nil
end

-- Return submit's refusal or nil. A job that would wait alone is never refused.
local function over_limit(state, max_jobs, max_tokens, max_own)
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

