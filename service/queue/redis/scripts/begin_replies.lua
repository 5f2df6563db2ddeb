-- A gateway begins to answer a producer's entry, or goes on with one that another has left: the reply stream is the entry's.
--
-- KEYS[10] {quire}:ingress:<producer>        stream, group `doors`
-- KEYS[11] {quire}:reply:<producer>:<id>     stream, the replies
-- KEYS[12] {quire}:reply:<producer>:<id>:of  hash, which entry the replies answer: entry, digest of its message, done
-- ARGV[9] gateway's name in the group   ARGV[10] entry   ARGV[11] digest   ARGV[12] life of the hash (s)
-- Returns {1, replies so far}; {0} where another gateway has the entry; {-1} where the stream answers an earlier entry
-- with the same message, {-2} one with another message that goes on. What was answered before is dropped.

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
