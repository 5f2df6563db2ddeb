-- A worker gives jobs back, with what it has told of them; another goes on at once.
--
-- ARGV[9] cause, for jobs that were in flight when the engine died; '' where they are given back in peace
-- ARGV[10] msgpack list: job, fence, job, fence, ...
-- Returns how many were ours to give.

local held, num_back = cmsgpack.unpack(ARGV[10]), 0
for i = 1, #held, 2 do
  if redis.call('HGET', CLAIMS, held[i]) == held[i + 1] then
    put_back(held[i], read_state(held[i]), ARGV[9] ~= '' and ARGV[9] or nil)
    num_back = num_back + 1
  end
end
return num_back
