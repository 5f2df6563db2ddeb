-- A worker ends a job that no engine can go on with; one that kills engines is kept for whoever wants to see why.
--
-- KEYS[10] {quire}:dead  stream, dead letters; only with a letter
-- ARGV[9] job   ARGV[10] fence   ARGV[11] reason   ARGV[12] longest {quire}:dead (entries)   ARGV[13] dead letter
-- Returns 1, or 0 where the job is no longer ours.

local job = ARGV[9]
if redis.call('HGET', CLAIMS, job) ~= ARGV[10] then return 0 end
if KEYS[10] then redis.call('XADD', KEYS[10], 'MAXLEN', '~', ARGV[12], '*', 'm', ARGV[13]) end
end_job(job, read_state(job), ARGV[11])
return 1
