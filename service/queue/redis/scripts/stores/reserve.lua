-- Charge (ledger.lua) at least ARGV[10] bytes for a name. Returns {1}, or a refusal.

local name, bytes, life_ms, quota, queue_share = unpack(ARGV, 9, 13)
trim_ledger(KEYS[10], KEYS[11])
local more = math.max(0, bytes - bytes_of(KEYS[11], name))
return charge_tenant(KEYS[10], KEYS[11], name, more, life_ms, quota, queue_share) or {1}
