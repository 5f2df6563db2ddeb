-- Move a batch's answers, in line order, to its files; once.
--
-- KEYS[12] hash: line -> answer  KEYS[13] hash: moved (first line not moved), output, error (bytes)
-- KEYS[14..15] lists: files
-- ARGV[9..11] ledger names of answers and files  ARGV[14] line after the last
-- ARGV[15] bytes charged  ARGV[16..17] appended to files
-- Returns the first line not moved.

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
