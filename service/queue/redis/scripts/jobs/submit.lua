-- Accept a job, once; end it if it was cancelled before.
--
-- KEYS[10] tombstone  KEYS[11..13] record, ledger, sizes; optional, with ARGV[17..22]
-- ARGV[9] epoch, if there is none  ARGV[13] deadline or ''
-- ARGV[14..16] limits or ''  ARGV[17] record  ARGV[20] quota or ''  ARGV[22] '1': required
-- Returns {1}; {0, feed or '' if ended} for a known job; or a refusal: {-1, jobs, tokens} queue full, {-2, jobs,
-- tokens} tenant's share full, {-3, bytes, limit} no space for the record.

redis.call('SET', EPOCH, ARGV[9], 'NX')
local job, state = ARGV[10], cmsgpack.unpack(ARGV[12])
local known = read_state(job)
if known or redis.call('EXISTS', state.log) == 1 then return {0, known and known.feed or ''} end
-- A request that ends with its client needs no record: it is never resumed.
local function store_record()
  if not KEYS[11] then return end
  local life_ms, bytes, quota, id, is_needed = unpack(ARGV, 18, 22)
  trim_ledger(KEYS[12], KEYS[13])
  local full = charge_tenant(KEYS[12], KEYS[13], id, bytes - bytes_of(KEYS[13], id), life_ms, quota, '')
  if not full then redis.call('SET', KEYS[11], ARGV[17], 'PX', life_ms) end
  if full and is_needed == '1' then return {-3, full[2], full[3]} end
end
local unwanted = redis.call('GET', KEYS[10])
if unwanted then
  local no_record = store_record()
  if no_record then return no_record end
  redis.call('DEL', KEYS[10])
  end_job(job, state, unwanted)
  return {1}
end
local max_jobs, max_tokens, max_own = unpack(ARGV, 14, 16)
local full = over_limit(state, max_jobs, max_tokens, max_own)
full = full or store_record()
if full then return full end
redis.call('HSET', JOBS, job, ARGV[11])
enqueue(job, state, is_suspect(state) and SUSPECTS or WAITING)
if ARGV[13] ~= '' then redis.call('ZADD', DEADLINES, ARGV[13], job) end
return {1}
