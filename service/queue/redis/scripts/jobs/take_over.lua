-- Put back dead workers' jobs; end expired waiting jobs.
--
-- ARGV[9] '1': an expired lease means death  ARGV[10] asking worker
-- ARGV[11] '1': its namesake is dead
-- Returns the number of jobs put back.

local now, dead, num_back = now_s(), {}, 0
if ARGV[9] == '1' then
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now)) do dead[owner] = true end
end
dead[ARGV[10]] = ARGV[11] == '1' or nil
if next(dead) then
  local deaths = {} -- by owner; a predecessor's counts only if it left jobs
  local function death_of(owner)
    deaths[owner] = deaths[owner] or count_death(KEYS[10], tonumber(ARGV[12]))
    return deaths[owner]
  end
  for owner in pairs(dead) do
    if owner ~= ARGV[10] then death_of(owner) end
  end
  local claims = redis.call('HGETALL', CLAIMS)
  for i = 1, #claims, 2 do
    local owner = string.match(claims[i + 1], '^%d+ (.*)$')
    if dead[owner] then
      put_back(claims[i], read_state(claims[i]), 'the worker ' .. owner .. ' died', death_of(owner))
      num_back = num_back + 1
    end
  end
  for owner in pairs(dead) do
    redis.call('ZREM', LEASES, owner)
    redis.call('HDEL', LOADS, owner)
  end
end
for _, job in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', now, 'LIMIT', '0', '256')) do
  local state = read_state(job)
  if state and state.entry then end_job(job, state, 'deadline') end
end
return num_back
