-- Moves answers of a batch, in the order of its lines, to the files that it ends with. Once: a second time nothing happens.
--
-- KEYS[10] ledger  KEYS[11] sizes  (see ledger.lua)   KEYS[12] hash, answers by line
-- KEYS[13] hash; moved: the first line that is not in the files yet; output, error: bytes of the two files
-- KEYS[14] list, contents of the output file   KEYS[15] list, contents of the error file
-- ARGV[9] the answers' name in the ledger   ARGV[10] that of the output file   ARGV[11] of the error file
-- ARGV[12] life (ms)   ARGV[13] first line   ARGV[14] line behind the last   ARGV[15] bytes that the answers took
-- ARGV[16] what the output file gets   ARGV[17] what the error file gets
-- Returns the first line that is not in the files yet.

local ledger, sizes, lines, progress = unpack(KEYS, 10, 13)
local life_ms, first, past = ARGV[12], tonumber(ARGV[13]), tonumber(ARGV[14])
local moved = tonumber(redis.call('HGET', progress, 'moved') or '0')
if moved ~= first then return moved end
for i, field in ipairs({'output', 'error'}) do
  local data, contents = ARGV[15 + i], KEYS[13 + i]
  if #data > 0 then
    redis.call('RPUSH', contents, data)
    charge_tenant(ledger, sizes, ARGV[9 + i], #data, life_ms, '', '')
    redis.call('HINCRBY', progress, field, #data)
  end
  redis.call('PEXPIRE', contents, life_ms)
end
for number = first, past - 1 do redis.call('HDEL', lines, number) end
charge_tenant(ledger, sizes, ARGV[9], -tonumber(ARGV[15]), life_ms, '', '')
redis.call('HSET', progress, 'moved', past)
redis.call('PEXPIRE', progress, life_ms)
return past
