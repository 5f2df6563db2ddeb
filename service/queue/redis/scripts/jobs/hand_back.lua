-- Return claimed jobs to the queue.
--
-- ARGV[9] cause of the engine's death, or ''  ARGV[10] msgpack list: job, fence, ...
-- ARGV[12] name of the death, counted once
-- Returns the number of jobs that were ours.

local held, num_back = cmsgpack.unpack(ARGV[10]), 0
local cause = ARGV[9] ~= '' and ARGV[9] or nil
if cause then
  local told = redis.call('HGET', KEYS[10], 'told') or ''
  if string.find(told, ARGV[12], 1, true) then return 0 end
  redis.call('HSET', KEYS[10], 'told', string.sub(ARGV[12] .. ' ' .. told, 1, 512))
end
local death = cause and count_death(KEYS[10], tonumber(ARGV[11]))
for i = 1, #held, 2 do
  if redis.call('HGET', CLAIMS, held[i]) == held[i + 1] then
    put_back(held[i], read_state(held[i]), cause, death)
    num_back = num_back + 1
  end
end
return num_back
