-- Claim jobs for a worker, previously claimed ones first; end expired ones.
--
-- KEYS[10..] queues, in order
-- ARGV[9] epoch  ARGV[12] lease (s), if it has none
-- ARGV[13] '1': after a lost answer, first return its claims not in ARGV[14] (msgpack list)
-- ARGV[15..20] ClaimBudget, see worker.py
-- ARGV[21] wait (s) for a free slot elsewhere before reclaiming
-- ARGV[22] branches that the worker holds, '' to also claim jobs meant for others
-- ARGV[23..25] KEEP_S, MAX_HELD, MAX_RATIO of prefixes.py
-- Returns per job: id, message, attempt, standing ('', 'suspect', 'recurrent', 'deadly'), total deaths, cause,
-- stops (msgpack list or '').

if redis.call('GET', EPOCH) ~= ARGV[9] then return redis.error_reply('EPOCH Redis has lost what it knew') end
local MOST_RETURNED = 64
local owner, now = ARGV[10], now_s()
local branches_left, tokens_left = tonumber(ARGV[11]), tonumber(ARGV[15]) or math.huge
local num_reserved, num_slots, reclaimable_tokens_left = tonumber(ARGV[16]), tonumber(ARGV[17]), tonumber(ARGV[20])
local slots = cmsgpack.unpack(ARGV[18])
local num_tenants, absent, sated, num_sated, reclaim_after = tonumber(ARGV[19]), nil, {}, 0, tonumber(ARGV[21])
redis.call('ZADD', LEASES, 'NX', now + tonumber(ARGV[12]), owner)
local is_alone, claimed = redis.call('ZCARD', LEASES) == 1, {}

local held, keep_s, max_held, max_ratio = tonumber(ARGV[22]), tonumber(ARGV[23]), tonumber(ARGV[24]), tonumber(ARGV[25])
local num_branches, peers, least_held, num_left, MOST_AHEAD = branches_left, nil, held, 0, 2

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

-- See service/fair_share.py. `ones`: number of other tenants that want one slot each.
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

-- Return whether a job is within its tenant's share, or its only one, and can start if others keep to their shares.
-- Recent and waiting tenants want one slot.
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

-- Of its tenant's first job.
local function waited_s(state)
  local rank = redis.call('ZRANGE', lane_jobs(state), 0, 0, 'WITHSCORES')[2]
  return now - (rank - state.priority * AGE_S)
end

local function has_waited(state)
  return is_alone or waited_s(state) >= reclaim_after
end

-- The other workers with room; a full one is found with its load.
local function find_peers()
  peers = {}
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', LEASES, now, '+inf')) do
    local num, free = string.match(redis.call('HGET', LOADS, name) or '', '^(%d+) (%d+)$')
    if name ~= owner and num and free ~= '0' then
      peers[name] = tonumber(num)
      least_held = math.min(least_held, peers[name])
    end
  end
end

local function prefix_fields(state)
  local fields = {}
  for i = 1, #state.prefixes, 8 do fields[#fields + 1] = string.sub(state.prefixes, i, i + 2) end
  return fields
end

-- Return the live worker that last got the job's longest known prefix, or nil.
local function worker_with_prefix(state)
  if not state.prefixes then return end
  local fields = prefix_fields(state)
  local known = redis.call('HMGET', PREFIXES, unpack(fields))
  for i = #fields, 1, -1 do
    if known[i] and string.sub(known[i], 1, 5) == string.sub(state.prefixes, 8 * i - 4, 8 * i) then
      local name = string.sub(known[i], 6)
      if name == owner or peers[name] then return name end
    end
  end
end

-- Return whether another worker should claim the job: the worker with its prefix, unless busier than others; else one
-- less busy than this.
local function belongs_to_other(state)
  if is_alone or not held then return false end
  if not peers then find_peers() end
  local own_held = held + num_branches - branches_left
  local name, most = worker_with_prefix(state), max_held + max_ratio * least_held
  if name and (name == owner and own_held or peers[name]) <= most then
    return name ~= owner and waited_s(state) < keep_s
  end
  return own_held > MOST_AHEAD + max_ratio * least_held and waited_s(state) < keep_s
end

local function remember_prefixes(state)
  if is_alone or not state.prefixes then return end
  local pairs_of = {}
  for i, field in ipairs(prefix_fields(state)) do
    pairs_of[2 * i - 1], pairs_of[2 * i] = field, string.sub(state.prefixes, 8 * i - 4, 8 * i) .. owner
  end
  redis.call('HSET', PREFIXES, unpack(pairs_of))
end

local function take(job, state)
  if state.cancel then return end_job(job, state, state.cancel) end
  if state.deadline and state.deadline <= now then return end_job(job, state, 'deadline') end
  leave_queue(job, state)
  remember_prefixes(state)
  state.prefixes = nil
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
    local job = next_job(now, lanes, sated, num_sated)
    if not job then return end
    local state, num_before = read_state(job), #claimed
    if belongs_to_other(state) then
      sated[state.tenant], num_sated, num_left = true, num_sated + 1, num_left + 1
    elseif is_unrestricted or (fits(state) and (has_budget() or has_waited(state))) then
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
  while has_budget() and (KEYS[queue] ~= WAITING or (branches_left > num_reserved and num_left == 0)) do
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
if held and not is_alone then
  local num_free = has_budget() and branches_left or 0
  redis.call('HSET', LOADS, owner, whole(held + num_branches - branches_left) .. ' ' .. whole(num_free))
end
return claimed
