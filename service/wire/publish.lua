-- Appends the events of one step, tells the doors, settles the jobs that ended: one round trip, one atomic act.
--
-- KEYS[1]                quire:jobs                 stream, group `workers`: queued and claimed jobs
-- KEYS[2 .. 1 + F]       quire:feed:<door>          stream: the step's events for one door, in one entry
-- then for each event, two keys of its job:
--                        quire:{<job>}:events       stream, its event log: entry <number>-0
--                        quire:{<job>}:cancel       string, its tombstone
-- ARGV[1] number of feeds F   ARGV[2] longest feed (entries)   ARGV[3] feed's life (s)
-- ARGV[4] life of a log without news (s)   ARGV[5] life of a log after the end (s)
-- then for each event: feed (1..F), number, message, reason of the end or '', entry id of the job in quire:jobs
-- Returns how many events were new. A number already in the log is not written again, to no place.
-- A check of the claim's owner and attempt belongs where `refused` is found: both lead to the same skip.

local num_feeds = tonumber(ARGV[1])
local batches = {}
for feed = 1, num_feeds do batches[feed] = {} end

local num_new = 0
local num_events = (#ARGV - 5) / 5
for event = 0, num_events - 1 do
  local feed, number, message, reason, entry = unpack(ARGV, 6 + event * 5, 10 + event * 5)
  local log, tombstone = KEYS[2 + num_feeds + event * 2], KEYS[3 + num_feeds + event * 2]
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
    local batch = batches[tonumber(feed)]
    batch[#batch + 1] = message
    -- Number 1 makes the log; every 64th keeps the life of a long one, or of one whose beginning was lost, in order.
    if reason == '' and tonumber(number) % 64 == 1 then redis.call('EXPIRE', log, ARGV[4]) end
  end
  if reason ~= '' then
    redis.call('EXPIRE', log, ARGV[5])
    redis.call('XACK', KEYS[1], 'workers', entry)
    redis.call('XDEL', KEYS[1], entry)
    redis.call('DEL', tombstone)
  end
end

for feed = 1, num_feeds do
  if #batches[feed] > 0 then
    redis.call('XADD', KEYS[1 + feed], 'MAXLEN', '~', ARGV[2], '*', 'm', table.concat(batches[feed]))
    redis.call('EXPIRE', KEYS[1 + feed], ARGV[3])
  end
end
return num_new
