-- Puts the jobs of dead workers back, and ends those that waited past their deadline.
--
-- KEYS[10] {quire}:deaths  hash, how many engines have died, and when the last one did
-- ARGV[9] '1': workers whose lease has run out are dead; '0': this is not to be judged now
-- ARGV[10] the worker that asks, which is alive   ARGV[11] '1': one of its name was here before, and is dead
-- ARGV[12] how shortly before a death (s) another speaks for the jobs that were in flight at it
-- Returns how many jobs were put back.

local now, dead, num_back = now_s(), {}, 0
if ARGV[9] == '1' then
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now)) do dead[owner] = true end
end
dead[ARGV[10]] = ARGV[11] == '1' or nil
if next(dead) then
  local deaths = {} -- by owner, which of all engine deaths was its own; of a predecessor, only if it left anything
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
  for owner in pairs(dead) do redis.call('ZREM', LEASES, owner) end
end
for _, job in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', now, 'LIMIT', '0', '256')) do
  local state = read_state(job)
  if state and state.entry then end_job(job, state, 'deadline') end
end
return num_back
