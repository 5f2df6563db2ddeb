-- Store a request's record, with a charge (ledger.lua), unless another has its idempotency key.
--
-- KEYS[13] optional  ARGV[15..16] prefix and suffix of a record's key
-- Returns {1, id of the key's request}, or a refusal.

local ledger, sizes = KEYS[10], KEYS[11]
local id, bytes, life_ms, quota, queue_share, record, before, behind = unpack(ARGV, 9, 16)
local holder = KEYS[13] and redis.call('GET', KEYS[13])
if holder and holder ~= id and redis.call('EXISTS', before .. holder .. behind) == 1 then return {1, holder} end
trim_ledger(ledger, sizes)
local full = charge_tenant(ledger, sizes, id, bytes - bytes_of(sizes, id), life_ms, quota, queue_share)
if full then return full end
redis.call('SET', KEYS[12], record, 'PX', life_ms)
if KEYS[13] then redis.call('SET', KEYS[13], id, 'PX', life_ms) end
return {1, id}
