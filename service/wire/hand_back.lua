-- A worker gives jobs back, with what it has told of them; another goes on at once.
--
-- KEYS[10] {quire}:deaths  string, how many engines have died; only with a cause
-- ARGV[9] cause, for jobs that were in flight when the engine died; '' where they are given back in peace
-- ARGV[10] msgpack list: job, fence, job, fence, ...
-- Returns how many were ours to give.

local held, num_back = cmsgpack.unpack(ARGV[10]), 0
local cause = ARGV[9] ~= '' and ARGV[9] or nil
local death = cause and redis.call('INCR', KEYS[10])
for i = 1, #held, 2 do
  if redis.call('HGET', CLAIMS, held[i]) == held[i + 1] then
    put_back(held[i], read_state(held[i]), cause, death)
    num_back = num_back + 1
  end
end
return num_back
