-- Accepts a job, once: a second time nothing happens. One that was cancelled before it came ends here.
--
-- KEYS[10] {quire}:{<job>}:cancel  string, its tombstone
-- KEYS[11] {quire}:{<id>}:request  string, the record of the request that it is of; only with a record
-- ARGV[9] epoch, if there is none   ARGV[10] job   ARGV[11] message   ARGV[12] state   ARGV[13] deadline or ''
-- ARGV[14] most jobs that may wait   ARGV[15] most tokens of all   ARGV[16] most tokens of one tenant; '' for no bound
-- ARGV[17] the record   ARGV[18] its life (s); written if the job is accepted
-- Returns {1}; {0, feed} for one that is there already, with the feed that gets its events, '' if it has ended; or, for
-- one that finds no room, {-1, jobs, tokens} where the queue is full, {-2, jobs, tokens} where its tenant has its share:
-- what waits of all, or of the tenant.

redis.call('SET', EPOCH, ARGV[9], 'NX')
local job, state = ARGV[10], cmsgpack.unpack(ARGV[12])
local known = read_state(job)
if known or redis.call('EXISTS', state.log) == 1 then return {0, known and known.feed or ''} end
local function remember()
  if KEYS[11] then redis.call('SET', KEYS[11], ARGV[17], 'EX', ARGV[18]) end
end
local unwanted = redis.call('GET', KEYS[10])
if unwanted then
  redis.call('DEL', KEYS[10])
  remember()
  end_job(job, state, unwanted)
  return {1}
end
local max_jobs, max_tokens, max_own = unpack(ARGV, 14, 16)
local full = no_room(state, max_jobs, max_tokens, max_own)
if full then return full end
remember()
redis.call('HSET', JOBS, job, ARGV[11])
enqueue(job, state, is_suspect(state) and SUSPECTS or WAITING)
if ARGV[13] ~= '' then redis.call('ZADD', DEADLINES, ARGV[13], job) end
return {1}
