-- Keeps the record of a request, unless another one holds its idempotency key.
--
-- KEYS[10] ledger  KEYS[11] sizes  (see ledger.lua)   KEYS[12] {quire}:{<id>}:request   string, the record
-- KEYS[13] {quire}:idempotency:<hash>   string, the id of the request that came first under a client's key; only with one
-- ARGV[9] the request's id   ARGV[10] bytes   ARGV[11] life (ms)   ARGV[12] quota or ''   ARGV[13] queue's share or ''
-- ARGV[14] the record   ARGV[15], ARGV[16] what stands before and behind an id in the key of its record
-- Returns {1, id of the request that holds the key}: this one's where no other does, or where the other's record is gone;
-- or, where there is no room, what `charge_tenant` says.

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
