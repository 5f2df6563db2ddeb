-- Somebody no longer wants a job, or one branch of it. One that waits ends here; the worker of one that runs is told,
-- and whoever may take it over; for one that is still to come it is remembered.
--
-- KEYS[10] {quire}:{<job>}:cancel  string, its tombstone: why it is not wanted
-- KEYS[11] {quire}:{<job>}:events  stream, its event log
-- KEYS[12] {quire}:cancels         stream, read by every worker
-- ARGV[9] job   ARGV[10] reason   ARGV[11] branch or ''   ARGV[12] tombstone's life (s)
-- ARGV[13] longest {quire}:cancels (entries)   ARGV[14] message
-- Returns 1, or 0 where the job has ended already.

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
