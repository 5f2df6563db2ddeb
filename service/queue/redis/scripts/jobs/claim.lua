-- Claim jobs for a worker, those claimed before first; end expired ones.
--
-- KEYS[10..] queues, in order
-- ARGV[9] epoch  ARGV[12] lease (s), if it has none
-- ARGV[13] '1': after a lost answer, first return its claims not in ARGV[14] (msgpack list)
-- ARGV[15..20] ClaimBudget, see worker.py
-- ARGV[21] wait (s) for a free slot elsewhere before reclaiming
-- Returns per job: id, message, attempt, standing ('', 'suspect', 'recurrent', 'deadly'), total deaths, cause,
-- stops (msgpack list or '').

if redis.call('GET', EPOCH) ~= ARGV[9] then return redis.error_reply('EPOCH Redis has lost what it knew') end
local MOST_RETURNED = 64
local owner, now, no_tenant = ARGV[10], now_s(), {}
local branches_left, tokens_left = tonumber(ARGV[11]), tonumber(ARGV[15]) or math.huge
local num_reserved, num_slots, reclaimable_tokens_left = tonumber(ARGV[16]), tonumber(ARGV[17]), tonumber(ARGV[20])
local slots = cmsgpack.unpack(ARGV[18])
local num_tenants, absent, sated, num_sated, reclaim_after = tonumber(ARGV[19]), nil, {}, 0, tonumber(ARGV[21])
redis.call('ZADD', LEASES, 'NX', now + tonumber(ARGV[12]), owner)
local is_alone, claimed = redis.call('ZCARD', LEASES) == 1, {}

local function has_budget() return branches_left > 0 and tokens_left > 0 end

local function is_restricted() return branches_left <= num_reserved or tokens_left <= 0 end

local function count_absent()
  if absent then return absent end
  local waiting = LANE .. 'normal'
  absent = redis.call('ZCARD', waiting)
  for tenant in pairs(slots) do
    if redis.call('ZRANK', waiting, tenant) then absent = absent - 1 end
  end
  return absent
end

-- See service/fair_share.py; `ones`: further tenants that want one slot.
local function fair_share(num_in_all, wanted, ones)
  table.sort(wanted)
  local left, count = num_in_all - ones, #wanted
  if left < count then return 1 end
  for place, want in ipairs(wanted) do
    local share = math.floor(left / (count - place + 1))
    if want > share then return math.max(1, share) end
    left = left - want
  end
  return num_in_all
end

-- Return whether a job is within its tenant's share, or its only one, and can start if others keep to theirs. Recent
-- and waiting tenants want one slot.
local function fits(state)
  local count, others = (slots[state.tenant] or 0) + (state.branches or 1), {}
  for tenant, num in pairs(slots) do
    if tenant ~= state.tenant then others[#others + 1] = num end
  end
  local is_only = not slots[state.tenant]
  local num_absent = math.max(num_tenants - #others, count_absent() + (is_only and 0 or 1)) - 1
  local granted, wanted = count, {count, unpack(others)}
  local share = fair_share(num_slots, wanted, math.max(0, num_absent))
  if not is_only and count > share then return false end
  for _, num in ipairs(others) do granted = granted + math.min(num, share) end
  return branches_left > 0 or granted <= num_slots
end

local function can_reclaim() return num_slots > 0 and (has_budget() or reclaimable_tokens_left > 0) end

local function has_waited(state)
  local rank = redis.call('ZRANGE', lane_jobs(state), 0, 0, 'WITHSCORES')[2]
  return is_alone or now - (rank - state.priority * AGE_S) >= reclaim_after
end

local function take(job, state)
  if state.cancel then return end_job(job, state, state.cancel) end
  if state.deadline and state.deadline <= now then return end_job(job, state, 'deadline') end
  leave_queue(job, state)
  state.attempts = state.attempts + 1
  state.told = state.attempts > 1 and last_number(state.log) or 0
  write_state(job, state)
  local branches = state.branches or 1
  branches_left = branches_left - branches
  local tokens = (state.prompt or 0) + state.told * branches
  tokens_left, reclaimable_tokens_left = tokens_left - tokens, reclaimable_tokens_left - tokens
  if state.tenant then
    if not slots[state.tenant] then absent = nil end
    slots[state.tenant] = (slots[state.tenant] or 0) + branches
  end
  redis.call('HSET', CLAIMS, job, state.attempts .. ' ' .. owner)
  local stops = state.stops and cmsgpack.pack(state.stops) or ''
  local standing = is_deadly(state) and 'deadly' or is_recurrent(state) and 'recurrent' or is_suspect(state) and 'suspect'
  local message = redis.call('HGET', JOBS, job)
  claimed[#claimed + 1] = {job, message, state.attempts, standing or '', state.deaths_in_all, state.cause or '', stops}
end

if ARGV[13] == '1' then
  local known = {}
  for _, job in ipairs(cmsgpack.unpack(ARGV[14])) do known[job] = true end
  local claims = redis.call('HGETALL', CLAIMS)
  for i = 1, #claims, 2 do
    if not known[claims[i]] and string.match(claims[i + 1], '^%d+ (.*)$') == owner then
      local state = read_state(claims[i])
      -- A job beyond the budget would stay claimed and never run.
      if has_budget() or can_reclaim() then take(claims[i], state) else put_back(claims[i], state) end
    end
  end
end

local function take_by_turns()
  local num_looked, most_looked = 0, math.max(0, branches_left) + 256
  while num_looked < most_looked and (has_budget() or can_reclaim()) do
    local is_unrestricted = not is_restricted()
    if not is_unrestricted and not can_reclaim() then return end
    local lanes = has_budget() and LANES or {'normal'}
    local job = next_job(now, lanes, is_unrestricted and no_tenant or sated, is_unrestricted and 0 or num_sated)
    if not job then return end
    local state, num_before = read_state(job), #claimed
    if is_unrestricted or (fits(state) and (has_budget() or has_waited(state))) then
      take(job, state)
      if #claimed > num_before then charge(state) end
    else
      sated[state.tenant], num_sated = true, num_sated + 1
    end
    num_looked = num_looked + 1
  end
end

local function take_returned()
  if has_budget() then return end
  local too_many = {}
  for _, entry in ipairs(redis.call('XRANGE', RETURNED, '-', '+', 'COUNT', MOST_RETURNED)) do
    local state = read_state(entry[2][2])
    if not can_reclaim() then return end
    if state and state.entry == entry[1] and not too_many[state.tenant] then
      if fits(state) then take(entry[2][2], state) else too_many[state.tenant] = true end
    end
  end
end

for queue = 10, #KEYS do
  if KEYS[queue] == WAITING then take_by_turns() end
  while has_budget() and (KEYS[queue] ~= WAITING or branches_left > num_reserved) do
    local entries = redis.call('XRANGE', KEYS[queue], '-', '+', 'COUNT', branches_left)
    if #entries == 0 then break end
    for _, entry in ipairs(entries) do
      local state = read_state(entry[2][2])
      if not state or state.entry ~= entry[1] then
        redis.call('XDEL', KEYS[queue], entry[1])
      elseif has_budget() then
        take(entry[2][2], state)
      end
    end
  end
  if KEYS[queue] == RETURNED then take_returned() end
end
return claimed
