-- Renew a worker's lease.
--
-- KEYS[10] {quire}:alone  ARGV[11] lease (s)  ARGV[12] msgpack list: job, fence, ...
-- Returns {1 if it runs suspects else 0, lost jobs...}.

if redis.call('GET', EPOCH) ~= ARGV[9] then return redis.error_reply('EPOCH Redis has lost what it knew') end
local owner, held = ARGV[10], cmsgpack.unpack(ARGV[12])
redis.call('ZADD', LEASES, now_s() + tonumber(ARGV[11]), owner)
local answer = {0}
for i = 1, #held, 2 do
  if redis.call('HGET', CLAIMS, held[i]) ~= held[i + 1] then answer[#answer + 1] = held[i] end
end
if redis.call('XLEN', SUSPECTS) > 0 then
  local other = redis.call('GET', KEYS[10])
  -- Its TTL follows Redis' clock, perhaps set back.
  if other and not redis.call('ZRANK', LEASES, other) then redis.call('DEL', KEYS[10]) end
  redis.call('SET', KEYS[10], owner, 'NX')
  if redis.call('GET', KEYS[10]) == owner then
    redis.call('PEXPIRE', KEYS[10], math.ceil(tonumber(ARGV[11]) * 1000))
    answer[1] = 1
  end
elseif redis.call('GET', KEYS[10]) == owner then
  redis.call('DEL', KEYS[10])
end
return answer
