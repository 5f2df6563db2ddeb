-- End a claimed job that no engine can continue.
--
-- KEYS[10] {quire}:dead  stream; only with a dead letter
-- ARGV[9] job  ARGV[10] fence  ARGV[11] reason  ARGV[12] max entries of {quire}:dead  ARGV[13] dead letter
-- Returns 1, or 0 if the job is not ours.

local job = ARGV[9]
if redis.call('HGET', CLAIMS, job) ~= ARGV[10] then return 0 end
if KEYS[10] then redis.call('XADD', KEYS[10], 'MAXLEN', '~', ARGV[12], '*', 'm', ARGV[13]) end
end_job(job, read_state(job), ARGV[11])
return 1
