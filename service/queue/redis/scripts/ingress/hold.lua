-- Renew a gateway's entries.
--
-- KEYS[10..] ingress streams  ARGV[10] msgpack list: stream (10..), entry, ...
-- Returns the entries (1..) that other gateways have.

local entries, lost = cmsgpack.unpack(ARGV[10]), {}
for i = 1, #entries, 2 do
  local stream, entry = KEYS[entries[i]], entries[i + 1]
  local pending = redis.pcall('XPENDING', stream, 'doors', entry, entry, '1', ARGV[9])
  if pending.err then
    if not string.find(pending.err, 'NOGROUP', 1, true) then return pending end
  elseif #pending > 0 then
    redis.call('XCLAIM', stream, 'doors', ARGV[9], '0', entry, 'JUSTID')
  else
    lost[#lost + 1] = (i + 1) / 2
  end
end
return lost
