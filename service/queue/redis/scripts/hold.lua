-- A door that is alive says which entries of producers it still works on, so that no other takes them for left behind.
--
-- KEYS[10..] {quire}:ingress:<producer>  streams, group `doors`
-- ARGV[9] door's name in the group   ARGV[10] msgpack list: stream (10..), entry, stream, entry, ...
-- Returns which of the entries (1..) are another door's now.

local held, lost = cmsgpack.unpack(ARGV[10]), {}
for i = 1, #held, 2 do
  local stream, entry = KEYS[held[i]], held[i + 1]
  local pending = redis.pcall('XPENDING', stream, 'doors', entry, entry, '1', ARGV[9])
  if pending.err then
    -- A stream that was lost with its group: nobody else has the entry, and the others are to be held all the same.
    if not string.find(pending.err, 'NOGROUP', 1, true) then return pending end
  elseif #pending > 0 then
    redis.call('XCLAIM', stream, 'doors', ARGV[9], '0', entry, 'JUSTID')
  else
    lost[#lost + 1] = (i + 1) / 2
  end
end
return lost
