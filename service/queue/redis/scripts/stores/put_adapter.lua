-- Write an adapter's record.
--
-- KEYS[10] {quire}:adapters  ARGV[9] name  ARGV[10] record  ARGV[11] '1': replace one of that name
-- Returns whether it was written.

if ARGV[11] ~= '1' and redis.call('HGET', KEYS[10], ARGV[9]) then return 0 end
redis.call('HSET', KEYS[10], ARGV[9], ARGV[10])
return 1
