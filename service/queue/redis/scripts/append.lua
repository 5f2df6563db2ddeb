-- Append a piece to a file that is being written.
--
-- KEYS[10] ledger  KEYS[11] sizes  KEYS[12] list: the file's pieces
-- ARGV[9..13] charge (ledger.lua); bytes 0 if reserved  ARGV[14] piece
-- Returns {number of pieces}, or the refusal of charge_tenant.

local ledger, sizes, contents = unpack(KEYS, 10, 12)
local name, bytes, life_ms, quota, queue_share, data = unpack(ARGV, 9, 14)
local full = queue_share ~= '' and no_memory(#data, tonumber(queue_share))
full = full or charge_tenant(ledger, sizes, name, tonumber(bytes), life_ms, quota, '')
if full then return full end
local length = redis.call('RPUSH', contents, data)
redis.call('PEXPIRE', contents, life_ms)
return {length}
