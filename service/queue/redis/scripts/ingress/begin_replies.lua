-- Begin or continue an entry's replies; replace another's finished stream.
--
-- KEYS: ingress stream; reply stream; hash: entry, digest of its message, done
-- Returns {1, number of replies}; {0} if another gateway has the entry; for an earlier entry's stream, {-1} with the
-- same message, {-2} if unfinished with another message.

local ingress, replies, of = unpack(KEYS, 10, 12)
local consumer, entry, digest, life = unpack(ARGV, 9, 12)
local pending = redis.pcall('XPENDING', ingress, 'doors', entry, entry, '1')
if pending.err then
  if not string.find(pending.err, 'NOGROUP', 1, true) then return pending end
elseif #pending > 0 and pending[1][2] ~= consumer then
  return {0}
end
local known = redis.call('HMGET', of, 'entry', 'digest', 'done')
if known[1] and known[1] ~= entry then
  if known[2] == digest then return {-1} end
  if not known[3] then return {-2} end
  redis.call('DEL', replies, of)
  known = {}
end
if not known[3] then
  redis.call('HSET', of, 'entry', entry, 'digest', digest)
  redis.call('EXPIRE', of, life)
end
return {1, redis.call('XLEN', replies)}
