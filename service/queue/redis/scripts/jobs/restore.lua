-- Assert a worker's claims after an outage, in which Redis may have lost data.
--
-- ARGV[9] known epoch  ARGV[10] new epoch, if there is none  ARGV[12] lease (s)
-- ARGV[13] msgpack list, per job: job, attempt, message, state, deadline or ''
-- Returns {epoch, lost jobs...}. A claim is restored unless a later attempt exists, a missing job only if all was lost.

redis.call('SET', EPOCH, ARGV[10], 'NX')
local epoch = redis.call('GET', EPOCH)
local is_new, owner = epoch ~= ARGV[9], ARGV[11]
redis.call('ZADD', LEASES, now_s() + tonumber(ARGV[12]), owner)
local answer, items = {epoch}, cmsgpack.unpack(ARGV[13])
for i = 1, #items, 5 do
  local job, attempt, message, fresh, deadline = unpack(items, i, i + 4)
  local fence, claim, state = attempt .. ' ' .. owner, redis.call('HGET', CLAIMS, job), read_state(job)
  if claim ~= fence then
    if not claim and state and state.entry and state.attempts < attempt then
      leave_queue(job, state)
    elseif is_new and not state then
      state = cmsgpack.unpack(fresh)
      redis.call('HSET', JOBS, job, message)
      if deadline ~= '' then redis.call('ZADD', DEADLINES, deadline, job) end
    else
      state = nil
      answer[#answer + 1] = job
    end
    if state then
      state.attempts = attempt
      write_state(job, state)
      redis.call('HSET', CLAIMS, job, fence)
    end
  end
end
return answer
