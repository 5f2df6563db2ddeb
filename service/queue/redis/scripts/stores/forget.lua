-- Drop the record of a request that was not accepted, and its idempotency key.
--
-- ARGV[10] job that keeps it if accepted, or ''
-- Returns 1, or 0 if kept.

local id, job, log = unpack(ARGV, 9, 11)
if job ~= '' and (redis.call('HEXISTS', JOBS, job) == 1 or redis.call('EXISTS', log) == 1) then return 0 end
release_name(KEYS[10], KEYS[11], id)
redis.call('DEL', KEYS[12])
if KEYS[13] and redis.call('GET', KEYS[13]) == id then redis.call('DEL', KEYS[13]) end
return 1
