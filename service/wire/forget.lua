-- Takes the record of a request away.
--
-- KEYS[10] {quire}:{<id>}:request       string, the record
-- KEYS[11] {quire}:idempotency:<hash>   string, taken away too if it stands for this request; only with a key
-- ARGV[9] the request's id   ARGV[10] one of its jobs: nothing happens where it was accepted; or ''   ARGV[11] its log or ''
-- Returns 1, or 0 where nothing happened.

local id, job, log = unpack(ARGV, 9, 11)
if job ~= '' and (redis.call('HEXISTS', JOBS, job) == 1 or redis.call('EXISTS', log) == 1) then return 0 end
redis.call('DEL', KEYS[10])
if KEYS[11] and redis.call('GET', KEYS[11]) == id then redis.call('DEL', KEYS[11]) end
return 1
