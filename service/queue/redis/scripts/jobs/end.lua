-- End a claimed job that no engine can continue.
--
-- KEYS[10] {quire}:dead, optional, with ARGV[12] max entries  ARGV[13] letter
-- ARGV[9] job  ARGV[10] fence  ARGV[11] reason
-- Returns 1, or 0 if it is not ours.

local job = ARGV[9]
if redis.call('HGET', CLAIMS, job) ~= ARGV[10] then return 0 end
if KEYS[10] then redis.call('XADD', KEYS[10], 'MAXLEN', '~', ARGV[12], '*', 'm', ARGV[13]) end
end_job(job, read_state(job), ARGV[11])
return 1
