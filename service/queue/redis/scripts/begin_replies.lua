-- Begin or continue the replies to a producer's entry.
--
-- KEYS[10] {quire}:ingress:<producer>        stream, group `doors`
-- KEYS[11] {quire}:reply:<producer>:<id>     stream: replies
-- KEYS[12] {quire}:reply:<producer>:<id>:of  hash: entry, digest of its message, done
-- ARGV[9] consumer  ARGV[10] entry  ARGV[11] digest  ARGV[12] TTL of the hash (s)
-- Returns {1, number of replies}; {0} another gateway has the entry; the stream is an earlier entry's: {-1} with the
-- same message, {-2} with another one and no last reply. A finished stream is replaced.

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
