-- Gives a worker jobs: those that were claimed before come first. One past its deadline ends here.
--
-- KEYS[10..] the queues to take from, in their order
-- ARGV[9] epoch   ARGV[10] worker   ARGV[11] most branches   ARGV[12] length of a lease (s), where it has none yet
-- ARGV[13] '1': the answer to an earlier claim may be lost, so jobs that are this worker's but for those in
-- ARGV[14] (msgpack list) come before all others
-- ARGV[15] most tokens, of prompts and what was told, or ''. What is there is given out as long as some is left: the last
-- job may be larger.
-- Tenants share the worker's places (service/fair_share.py). What one holds beyond its share is lent to it: where no room
-- is left, jobs of others are claimed all the same, as far as these keep to their own shares; with other workers about, new
-- ones only once they have waited for a free place.
-- ARGV[16] branches, the last ones, that are only for tenants that keep to their shares   ARGV[17] places; 0: nothing is
-- lent   ARGV[18] msgpack map, tenant -> how many it holds   ARGV[19] tenants in all at least   ARGV[20] like ARGV[15],
-- of what would be free if all that runs had to leave   ARGV[21] so long (s) they wait
-- Returns for each job: id, message, attempt, standing ('', 'suspect', 'recurrent' or 'deadly'), deaths in all, cause, stops (msgpack
-- list or '').

if redis.call('GET', EPOCH) ~= ARGV[9] then return redis.error_reply('EPOCH Redis has lost what it knew') end
local MOST_RETURNED = 64
local owner, now, nobody = ARGV[10], now_s(), {}
local branches_left, tokens_left = tonumber(ARGV[11]), tonumber(ARGV[15]) or math.huge
local num_reserved, num_places, lent_tokens_left = tonumber(ARGV[16]), tonumber(ARGV[17]), tonumber(ARGV[20])
local held = cmsgpack.unpack(ARGV[18])
local num_tenants, absent, sated, num_sated, lent_after = tonumber(ARGV[19]), nil, {}, 0, tonumber(ARGV[21])
redis.call('ZADD', LEASES, 'NX', now + tonumber(ARGV[12]), owner)
local is_alone, claimed = redis.call('ZCARD', LEASES) == 1, {}

local function has_room() return branches_left > 0 and tokens_left > 0 end

local function is_scarce() return branches_left <= num_reserved or tokens_left <= 0 end

-- Of tenants that hold nothing here, and whose jobs wait.
local function count_absent()
  if absent then return absent end
  local waiting = LANE .. 'normal'
  absent = redis.call('ZCARD', waiting)
  for tenant in pairs(held) do
    if redis.call('ZRANK', waiting, tenant) then absent = absent - 1 end
  end
  return absent
end

-- The most that one may have for certain: see service/fair_share.py. `ones`: how many want one, beside those listed.
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

-- Whether a job keeps to its tenant's share, or is its only one, and can begin if all others keep to theirs. Tenants with
-- nothing here want a place: those that were here lately, or whose jobs wait.
local function fits(state)
  local count, others = (held[state.tenant] or 0) + (state.branches or 1), {}
  for tenant, num in pairs(held) do
    if tenant ~= state.tenant then others[#others + 1] = num end
  end
  local is_only = not held[state.tenant]
  local num_absent = math.max(num_tenants - #others, count_absent() + (is_only and 0 or 1)) - 1
  local granted, wanted = count, {count, unpack(others)}
  local share = fair_share(num_places, wanted, math.max(0, num_absent))
  if not is_only and count > share then return false end
  for _, num in ipairs(others) do granted = granted + math.min(num, share) end
  return branches_left > 0 or granted <= num_places
end

local function lends() return num_places > 0 and (has_room() or lent_tokens_left > 0) end

-- Of the next job of its tenant, whose rank says when it came.
local function has_waited(state)
  local rank = redis.call('ZRANGE', lane_jobs(state), 0, 0, 'WITHSCORES')[2]
  return is_alone or now - (rank - state.priority * AGE_S) >= lent_after
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
  tokens_left, lent_tokens_left = tokens_left - tokens, lent_tokens_left - tokens
  if state.tenant then
    if not held[state.tenant] then absent = nil end
    held[state.tenant] = (held[state.tenant] or 0) + branches
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
      -- What there is no room for now would stay claimed, and no worker would compute it.
      if has_room() or lends() then take(claims[i], state) else put_back(claims[i], state) end
    end
  end
end

-- Waiting jobs by turns; what the loop below finds of them has no turn, and should not be there.
local function take_by_turns()
  local num_looked, most_looked = 0, math.max(0, branches_left) + 256
  while num_looked < most_looked and (has_room() or lends()) do
    local is_for_all = not is_scarce()
    if not is_for_all and not lends() then return end
    local lanes = has_room() and LANES or {'normal'}
    local job = next_job(now, lanes, is_for_all and nobody or sated, is_for_all and 0 or num_sated)
    if not job then return end
    local state, num_before = read_state(job), #claimed
    if is_for_all or (fits(state) and (has_room() or has_waited(state))) then
      take(job, state)
      if #claimed > num_before then charge(state) end
    else
      sated[state.tenant], num_sated = true, num_sated + 1
    end
    num_looked = num_looked + 1
  end
end

-- Jobs that were claimed before, of tenants that keep to their shares, though there is no room.
local function take_returned()
  if has_room() then return end
  local too_many = {}
  for _, entry in ipairs(redis.call('XRANGE', RETURNED, '-', '+', 'COUNT', MOST_RETURNED)) do
    local state = read_state(entry[2][2])
    if not lends() then return end
    if state and state.entry == entry[1] and not too_many[state.tenant] then
      if fits(state) then take(entry[2][2], state) else too_many[state.tenant] = true end
    end
  end
end

for queue = 10, #KEYS do
  if KEYS[queue] == WAITING then take_by_turns() end
  while has_room() and (KEYS[queue] ~= WAITING or branches_left > num_reserved) do
    local entries = redis.call('XRANGE', KEYS[queue], '-', '+', 'COUNT', branches_left)
    if #entries == 0 then break end
    for _, entry in ipairs(entries) do
      local state = read_state(entry[2][2])
      if not state or state.entry ~= entry[1] then
        redis.call('XDEL', KEYS[queue], entry[1])
      elseif has_room() then
        take(entry[2][2], state)
      end
    end
  end
  if KEYS[queue] == RETURNED then take_returned() end
end
return claimed
