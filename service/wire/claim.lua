-- Gives a worker jobs: those that were claimed before come first. One past its deadline ends here.
--
-- KEYS[10..] the queues to take from, in their order
-- ARGV[9] epoch   ARGV[10] worker   ARGV[11] most branches   ARGV[12] length of a lease (s), where it has none yet
-- ARGV[13] '1': the answer to an earlier claim may be lost, so jobs that are this worker's but for those in
-- ARGV[14] (msgpack list) come before all others
-- ARGV[15] most tokens, of prompts and what was told, or ''   ARGV[16] branches that are kept from the tenants in
-- ARGV[17] (msgpack list). What is there is given out as long as some is left: the last job may be larger.
-- Returns for each job: id, message, attempt, standing ('', 'suspect', 'recurrent' or 'deadly'), deaths in all, cause, stops (msgpack
-- list or '').

if redis.call('GET', EPOCH) ~= ARGV[9] then return redis.error_reply('EPOCH Redis has lost what it knew') end
local owner, now = ARGV[10], now_s()
local branches_left, tokens_left = tonumber(ARGV[11]), tonumber(ARGV[15]) or math.huge
local num_kept, kept_from, nobody = tonumber(ARGV[16]), {}, {}
local num_kept_from = 0
for i, tenant in ipairs(cmsgpack.unpack(ARGV[17])) do
  kept_from[tenant] = true
  num_kept_from = i
end
redis.call('ZADD', LEASES, 'NX', now + tonumber(ARGV[12]), owner)
local claimed = {}

local function has_room() return branches_left > 0 and tokens_left > 0 end

local function take(job, state)
  if state.cancel then return end_job(job, state, state.cancel) end
  if state.deadline and state.deadline <= now then return end_job(job, state, 'deadline') end
  leave_queue(job, state)
  state.attempts = state.attempts + 1
  state.told = state.attempts > 1 and last_number(state.log) or 0
  write_state(job, state)
  local branches = state.branches or 1
  branches_left = branches_left - branches
  tokens_left = tokens_left - (state.prompt or 0) - state.told * branches
  redis.call('HSET', CLAIMS, job, state.attempts .. ' ' .. owner)
  local stops = state.stops and cmsgpack.pack(state.stops) or ''
  local standing = is_deadly(state) and 'deadly' or is_recurrent(state) and 'recurrent' or is_suspect(state) and 'suspect'
  local message = redis.call('HGET', JOBS, job)
  claimed[#claimed + 1] = {job, message, state.attempts, standing or '', state.deaths_in_all, state.cause or '', stops}
end

if ARGV[13] == '1' then
  local held = {}
  for _, job in ipairs(cmsgpack.unpack(ARGV[14])) do held[job] = true end
  local claims = redis.call('HGETALL', CLAIMS)
  for i = 1, #claims, 2 do
    if not has_room() then break end
    if not held[claims[i]] and string.match(claims[i + 1], '^%d+ (.*)$') == owner then
      take(claims[i], read_state(claims[i]))
    end
  end
end

-- Waiting jobs by turns; what the loop below finds of them has no turn, and should not be there.
local function take_by_turns()
  local num_looked, most_looked = 0, branches_left + 256
  while has_room() and num_looked < most_looked do
    local is_kept = branches_left <= num_kept
    local job = next_job(now, is_kept and kept_from or nobody, is_kept and num_kept_from or 0)
    if not job then return end
    local state, num_before = read_state(job), #claimed
    take(job, state)
    if #claimed > num_before then charge(state) end
    num_looked = num_looked + 1
  end
end

for queue = 10, #KEYS do
  if KEYS[queue] == WAITING then take_by_turns() end
  while has_room() and (KEYS[queue] ~= WAITING or branches_left > num_kept) do
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
end
return claimed
