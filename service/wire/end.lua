-- A worker ends a job that no engine can go on with; one that kills engines is kept for whoever wants to see why.
--
-- KEYS[10] quire:dead  stream, dead letters; only with a letter
-- ARGV[6] job   ARGV[7] fence   ARGV[8] reason   ARGV[9] longest quire:dead (entries)   ARGV[10] dead letter
-- Returns 1, or 0 where the job is no longer ours.

local job = ARGV[6]
if redis.call('HGET', CLAIMS, job) ~= ARGV[7] then return 0 end
if KEYS[10] then redis.call('XADD', KEYS[10], 'MAXLEN', '~', ARGV[9], '*', 'm', ARGV[10]) end
end_job(job, read_state(job), ARGV[8])
return 1
