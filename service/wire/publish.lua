-- Appends the events of one step, tells the doors, settles the jobs that ended: one round trip, one atomic act.
--
-- KEYS[1]              quire:jobs              stream, group `workers`: queued and claimed jobs
-- next F keys          quire:feed:<door>       stream: the step's events for one door, in one entry
-- then for each event  quire:{<job>}:events    stream, its job's event log: entry <number>-0
-- then for each end    quire:{<job>}:cancel    string, its job's tombstone
-- ARGV[1] number of feeds F   ARGV[2] longest feed (entries)   ARGV[3] feed's life (s)
-- ARGV[4] life of a log without news (s)   ARGV[5] life of a log after the end (s)
-- ARGV[6] msgpack list (one argument, since clients pack many slowly), for each event five items:
--         feed (1..F), number, message, reason of the end or '', entry id of the job in quire:jobs
-- Returns how many events were new. A number already in the log is not written again, to no place.
-- A check of the claim's owner and attempt belongs where `refused` is found: both lead to the same skip.

local num_feeds = tonumber(ARGV[1])
local items = cmsgpack.unpack(ARGV[6])
local num_events = #items / 5
local batches = {}
for feed = 1, num_feeds do batches[feed] = {} end

local num_new, num_ends = 0, 0
for event = 1, num_events do
  local feed, number, message, reason, entry = unpack(items, event * 5 - 4, event * 5)
  local log = KEYS[1 + num_feeds + event]
  local written
  if reason == '' then
    written = redis.pcall('XADD', log, number .. '-0', 'm', message)
  else
    written = redis.pcall('XADD', log, number .. '-0', 'm', message, 'end', reason)
  end
  local refused = type(written) == 'table' and written.err
  if refused and not string.find(refused, 'equal or smaller', 1, true) then return written end
  if not refused then
    num_new = num_new + 1
    local batch = batches[feed]
    batch[#batch + 1] = message
    -- Number 1 makes the log; every 64th keeps the life of a long one, or of one whose beginning was lost, in order.
    if reason == '' and number % 64 == 1 then redis.call('EXPIRE', log, ARGV[4]) end
  end
  if reason ~= '' then
    num_ends = num_ends + 1
    redis.call('EXPIRE', log, ARGV[5])
    redis.call('XACK', KEYS[1], 'workers', entry)
    redis.call('XDEL', KEYS[1], entry)
    redis.call('DEL', KEYS[1 + num_feeds + num_events + num_ends])
  end
end

for feed = 1, num_feeds do
  if #batches[feed] > 0 then
    redis.call('XADD', KEYS[1 + feed], 'MAXLEN', '~', ARGV[2], '*', 'm', table.concat(batches[feed]))
    redis.call('EXPIRE', KEYS[1 + feed], ARGV[3])
  end
end
return num_new
