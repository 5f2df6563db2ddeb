-- Stores a record, in the place of the one before.
--
-- KEYS[10] ledger  KEYS[11] sizes  (see ledger.lua)
-- KEYS[12] string, the record      KEYS[13..] keys that live as long as it
-- ARGV[9] its name in the ledger   ARGV[10] bytes   ARGV[11] life (ms)   ARGV[12] quota or ''   ARGV[13] queue's share or ''
-- ARGV[14] the record              ARGV[15] '1': only in the place of another
-- Returns {1}; {0} where there is no other; or, where there is no room, what `charge_tenant` says.

local ledger, sizes, record = unpack(KEYS, 10, 12)
local name, bytes, life_ms, quota, queue_share, payload, replaces = unpack(ARGV, 9, 15)
if replaces == '1' and redis.call('EXISTS', record) == 0 then return {0} end
trim_ledger(ledger, sizes)
local full = charge_tenant(ledger, sizes, name, bytes - bytes_of(sizes, name), life_ms, quota, queue_share)
if full then return full end
redis.call('SET', record, payload, 'PX', life_ms)
for i = 13, #KEYS do redis.call('PEXPIRE', KEYS[i], life_ms) end
return {1}
