-- Append a piece to a file. ARGV[9..13] charge (ledger.lua), bytes 0 if reserved
-- Returns {number of pieces}, or a refusal.

local ledger, sizes, contents = unpack(KEYS, 10, 12)
local name, bytes, life_ms, quota, queue_share, data = unpack(ARGV, 9, 14)
local full = queue_share ~= '' and no_memory(#data, tonumber(queue_share))
full = full or charge_tenant(ledger, sizes, name, tonumber(bytes), life_ms, quota, '')
if full then return full end
local length = redis.call('RPUSH', contents, data)
redis.call('PEXPIRE', contents, life_ms)
return {length}
