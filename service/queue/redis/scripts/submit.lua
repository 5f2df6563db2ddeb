-- Accepts a job, once: a second time nothing happens. One that was cancelled before it came ends here.
--
-- KEYS[10] {quire}:{<job>}:cancel  string, its tombstone
-- KEYS[11] {quire}:{<id>}:request  string, the record of the request that it is of; only with a record, as what follows
-- KEYS[12] ledger of its tenant's records   KEYS[13] its sizes (see ledger.lua)
-- ARGV[9] epoch, if there is none   ARGV[10] job   ARGV[11] message   ARGV[12] state   ARGV[13] deadline or ''
-- ARGV[14] most jobs that may wait   ARGV[15] most tokens of all   ARGV[16] most tokens of one tenant; '' for no bound
-- ARGV[17] the record   ARGV[18] its life (ms)   ARGV[19] its bytes   ARGV[20] quota of the ledger or ''
-- ARGV[21] the record's id   ARGV[22] '1': the job is not accepted without it
-- Returns {1}; {0, feed} for one that is there already, with the feed that gets its events, '' if it has ended; or, for
-- one that finds no room, {-1, jobs, tokens} where the queue is full, {-2, jobs, tokens} where its tenant has its share:
-- what waits of all, or of the tenant; {-3, bytes, bound} where there is no room for its record.

redis.call('SET', EPOCH, ARGV[9], 'NX')
local job, state = ARGV[10], cmsgpack.unpack(ARGV[12])
local known = read_state(job)
if known or redis.call('EXISTS', state.log) == 1 then return {0, known and known.feed or ''} end
-- A request that ends with its client does without its record where there is no room for it: it is never resumed.
local function remember()
  if not KEYS[11] then return end
  local life_ms, bytes, quota, id, is_needed = unpack(ARGV, 18, 22)
  trim_ledger(KEYS[12], KEYS[13])
  local full = charge_tenant(KEYS[12], KEYS[13], id, bytes - bytes_of(KEYS[13], id), life_ms, quota, '')
  if not full then redis.call('SET', KEYS[11], ARGV[17], 'PX', life_ms) end
  if full and is_needed == '1' then return {-3, full[2], full[3]} end
end
local unwanted = redis.call('GET', KEYS[10])
if unwanted then
  local no_record = remember()
  if no_record then return no_record end
  redis.call('DEL', KEYS[10])
  end_job(job, state, unwanted)
  return {1}
end
local max_jobs, max_tokens, max_own = unpack(ARGV, 14, 16)
local full = no_room(state, max_jobs, max_tokens, max_own)
full = full or remember()
if full then return full end
redis.call('HSET', JOBS, job, ARGV[11])
enqueue(job, state, is_suspect(state) and SUSPECTS or WAITING)
if ARGV[13] ~= '' then redis.call('ZADD', DEADLINES, ARGV[13], job) end
return {1}
