-- Store the answer to a line of a batch; the first one stays.
--
-- KEYS[10] ledger  KEYS[11] sizes  KEYS[12] hash: line -> answer
-- KEYS[13] string: a byte per line, '+' answered well, '-' badly, 0 not yet
-- KEYS[14] hash: moved (first line not in the batch's files)
-- ARGV[9..13] charge (ledger.lua)  ARGV[14] line  ARGV[15] answer  ARGV[16] its byte
-- Returns {1}; {0} if it is answered; or the refusal of charge_tenant.

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
