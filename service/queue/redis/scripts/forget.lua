-- Takes the record of a request away.
--
-- KEYS[10] ledger  KEYS[11] sizes  (see ledger.lua)   KEYS[12] {quire}:{<id>}:request   string, the record
-- KEYS[13] {quire}:idempotency:<hash>   string, taken away too if it stands for this request; only with a key
-- ARGV[9] the request's id   ARGV[10] one of its jobs: nothing happens where it was accepted; or ''   ARGV[11] its log or ''
-- Returns 1, or 0 where nothing happened.

local id, job, log = unpack(ARGV, 9, 11)
if job ~= '' and (redis.call('HEXISTS', JOBS, job) == 1 or redis.call('EXISTS', log) == 1) then return 0 end
release_name(KEYS[10], KEYS[11], id)
redis.call('DEL', KEYS[12])
if KEYS[13] and redis.call('GET', KEYS[13]) == id then redis.call('DEL', KEYS[13]) end
return 1
