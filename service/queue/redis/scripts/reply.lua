-- Appends a reply under the id `<number>-0`, once: a second write of the same number changes nothing. Only the gateway that
-- has the entry may add to its replies, and no gateway may once the last of them is there.
--
-- KEYS[10] {quire}:ingress:<producer>        stream, group `doors`
-- KEYS[11] {quire}:reply:<producer>:<id>     stream, the replies
-- KEYS[12] {quire}:reply:<producer>:<id>:of  hash, which entry they answer (see begin_replies.lua)
-- ARGV[9] gateway's name in the group   ARGV[10] entry   ARGV[11] number   ARGV[12] message   ARGV[13] '1': the last one
-- ARGV[14] life of the stream (s)   ARGV[15] life of the hash until the last reply is there (s)
-- Returns 1; 0 where the entry is another gateway's, or the stream another entry's.

local ingress, replies, of = unpack(KEYS, 10, 12)
local consumer, entry, number, message, is_last, life, running_life = unpack(ARGV, 9, 15)
local known = redis.call('HMGET', of, 'entry', 'done')
if known[1] and known[1] ~= entry then return 0 end
if not known[2] then
  local pending = redis.pcall('XPENDING', ingress, 'doors', entry, entry, '1')
  if pending.err then
    -- Redis has lost the entry with its group: no other gateway holds it.
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
