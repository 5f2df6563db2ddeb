-- Append a reply as entry `<number>-0`, once, none after the last.
--
-- KEYS as in begin_replies.lua  ARGV[13] '1': last  ARGV[14..15] TTLs (s)
-- Returns 1; 0 if another gateway has the entry, or another entry the stream.

local ingress, replies, of = unpack(KEYS, 10, 12)
local consumer, entry, number, message, is_last, life, running_life = unpack(ARGV, 9, 15)
local known = redis.call('HMGET', of, 'entry', 'done')
if known[1] and known[1] ~= entry then return 0 end
if not known[2] then
  local pending = redis.pcall('XPENDING', ingress, 'doors', entry, entry, '1')
  if pending.err then
    -- The stream was lost.
    if not string.find(pending.err, 'NOGROUP', 1, true) then return pending end
  elseif #pending > 0 and pending[1][2] ~= consumer then
    return 0
  end
  local written = redis.pcall('XADD', replies, number .. '-0', 'm', message)
  local failed = type(written) == 'table' and written.err
  if failed and not string.find(failed, 'equal or smaller', 1, true) then return written end
  redis.call('HSET', of, 'entry', entry)
  if is_last == '1' then redis.call('HSET', of, 'done', number) end
  redis.call('EXPIRE', of, is_last == '1' and life or running_life)
  redis.call('EXPIRE', replies, life)
end
return 1
