-- Store a line's first answer, with a charge (ledger.lua).
--
-- KEYS[13] string: '+', '-' or 0 per line  KEYS[14] hash: moved (first line not in files)
-- Returns {1}; {0} if answered; or a refusal.

local ledger, sizes, lines, marks, progress = unpack(KEYS, 10, 14)
local name, bytes, life_ms, quota, queue_share, number, answer, mark = unpack(ARGV, 9, 16)
if tonumber(number) < tonumber(redis.call('HGET', progress, 'moved') or '0') then return {0} end
local before = redis.call('GETRANGE', marks, number, number)
if before ~= '' and before ~= '\0' then return {0} end
local full = charge_tenant(ledger, sizes, name, tonumber(bytes), life_ms, quota, queue_share)
if full then return full end
redis.call('HSET', lines, number, answer)
redis.call('SETRANGE', marks, number, mark)
redis.call('PEXPIRE', lines, life_ms)
redis.call('PEXPIRE', marks, life_ms)
return {1}
