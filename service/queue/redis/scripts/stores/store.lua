-- Store or replace a record, with a charge (ledger.lua).
--
-- KEYS[13..] keys with its TTL  ARGV[15] '1': only replace
-- Returns {1}; {0} if there is none to replace; or a refusal.

local ledger, sizes, record = unpack(KEYS, 10, 12)
local name, bytes, life_ms, quota, queue_share, payload, replaces = unpack(ARGV, 9, 15)
if replaces == '1' and redis.call('EXISTS', record) == 0 then return {0} end
trim_ledger(ledger, sizes)
local full = charge_tenant(ledger, sizes, name, bytes - bytes_of(sizes, name), life_ms, quota, queue_share)
if full then return full end
redis.call('SET', record, payload, 'PX', life_ms)
for i = 13, #KEYS do redis.call('PEXPIRE', KEYS[i], life_ms) end
return {1}
