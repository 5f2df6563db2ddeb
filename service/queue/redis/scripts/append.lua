-- Appends to a file that is being written.
--
-- KEYS[10] ledger  KEYS[11] sizes  (see ledger.lua)   KEYS[12] list, the file's contents
-- ARGV[9] its name in the ledger   ARGV[10] bytes, 0 where they are reserved   ARGV[11] life (ms)   ARGV[12] quota or ''   ARGV[13] queue's share or ''
-- ARGV[14] what is appended
-- Returns {pieces of the file}; or, where there is no room, what `charge_tenant` says.

local ledger, sizes, contents = unpack(KEYS, 10, 12)
local name, bytes, life_ms, quota, queue_share, data = unpack(ARGV, 9, 14)
local full = queue_share ~= '' and no_memory(#data, tonumber(queue_share))
full = full or charge_tenant(ledger, sizes, name, tonumber(bytes), life_ms, quota, '')
if full then return full end
local length = redis.call('RPUSH', contents, data)
redis.call('PEXPIRE', contents, life_ms)
return {length}
