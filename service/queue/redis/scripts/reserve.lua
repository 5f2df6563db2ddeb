-- A name takes at least so many bytes from now on.
--
-- KEYS[10] ledger  KEYS[11] sizes  (see ledger.lua)
-- ARGV[9] the name   ARGV[10] bytes   ARGV[11] life (ms)   ARGV[12] quota or ''   ARGV[13] queue's share or ''
-- Returns {1}; or, where there is no room, what `charge_tenant` says.

local name, bytes, life_ms, quota, queue_share = unpack(ARGV, 9, 13)
trim_ledger(KEYS[10], KEYS[11])
local more = math.max(0, bytes - bytes_of(KEYS[11], name))
return charge_tenant(KEYS[10], KEYS[11], name, more, life_ms, quota, queue_share) or {1}
