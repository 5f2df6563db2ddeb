-- Tells every worker that a job is no longer wanted, and remembers it for the one that will claim it.
--
-- KEYS[1]  quire:{<job>}:events   stream, its event log: the last entry of an ended job has the field `end`
-- KEYS[2]  quire:{<job>}:cancel   string, its tombstone: why it is not wanted
-- KEYS[3]  quire:cancels          stream, read by every worker
-- ARGV[1] reason   ARGV[2] tombstone's life (s)   ARGV[3] longest quire:cancels (entries)   ARGV[4] message
-- Returns 1, or 0 where the job has ended already.

local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', '1')[1]
if last and #last[2] > 2 then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2], 'NX')
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'm', ARGV[4])
return 1
