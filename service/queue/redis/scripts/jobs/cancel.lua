-- Cancel a job or branch; keep the cancel of a job not submitted yet.
--
-- KEYS: tombstone (string: reason); event log; {quire}:cancels
-- ARGV[11] branch or ''  ARGV[12] tombstone TTL (s)  ARGV[13] max entries  ARGV[14] message
-- Returns 1, or 0 if the job has ended.

local job, reason, branch = ARGV[9], ARGV[10], ARGV[11]
local state = read_state(job)
if not state then
  if has_ended(last_entry(KEYS[11])) then return 0 end
  if branch == '' then redis.call('SET', KEYS[10], reason, 'EX', ARGV[12], 'NX') end
  return 1
end
if branch ~= '' then
  state.stops = state.stops or {}
  state.stops[#state.stops + 1] = branch .. ' ' .. reason
  write_state(job, state)
elseif state.entry then
  end_job(job, state, reason)
  return 1
elseif not state.cancel then
  state.cancel = reason
  write_state(job, state)
end
redis.call('XADD', KEYS[12], 'MAXLEN', '~', ARGV[13], '*', 'm', ARGV[14])
return 1
