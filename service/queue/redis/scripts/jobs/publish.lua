-- Append a step's events to logs and feeds and settle ended jobs, atomically. An event counts only under its job's
-- current fence; a logged number is not written again.
--
-- KEYS[10..9+F] feeds, then each event's log
-- ARGV[9] epoch  ARGV[10] F
-- ARGV[11] msgpack list (clients pack many arguments slowly), per event: feed (1..F), job, fence, number, message,
--   end reason or ''
-- ARGV[12] msgpack list: event (1..) that ends its job, its tokens, ...
-- Returns the refused events (1..).

if redis.call('GET', EPOCH) ~= ARGV[9] then return redis.error_reply('EPOCH Redis has lost what it knew') end
local num_feeds = tonumber(ARGV[10])
local items = cmsgpack.unpack(ARGV[11])
local num_events = #items / 6
local jobs, batches, ended, refused, costs = {}, {}, {}, {}, {}
local costs_of_ended = cmsgpack.unpack(ARGV[12])
for i = 1, #costs_of_ended, 2 do costs[costs_of_ended[i]] = costs_of_ended[i + 1] end
for feed = 1, num_feeds do batches[feed] = {} end
for event = 1, num_events do jobs[event] = items[event * 6 - 4] end

local fences = {}
for first = 1, num_events, 4000 do -- Lua's stack holds 8000
  local some = redis.call('HMGET', CLAIMS, unpack(jobs, first, math.min(first + 3999, num_events)))
  for i = 1, #some do fences[first + i - 1] = some[i] end
end

for event = 1, num_events do
  local feed, job, fence, number, message, reason = unpack(items, event * 6 - 5, event * 6)
  local log = KEYS[9 + num_feeds + event]
  if fences[event] ~= fence then
    -- This event may have ended the job, its answer lost.
    local there = not fences[event] and redis.call('XRANGE', log, number .. '-0', number .. '-0')[1]
    if not there or there[2][2] ~= message then refused[#refused + 1] = event end
  else
    local written
    if reason == '' then
      written = redis.pcall('XADD', log, number .. '-0', 'm', message)
    else
      written = redis.pcall('XADD', log, number .. '-0', 'm', message, 'end', reason)
    end
    local failed = type(written) == 'table' and written.err
    if failed and not string.find(failed, 'equal or smaller', 1, true) then return written end
    if not failed then
      local batch = batches[feed]
      batch[#batch + 1] = message
      if reason == '' and number % 64 == 1 then redis.call('EXPIRE', log, RUNNING_LIFE_S) end
    end
    if reason ~= '' then
      redis.call('EXPIRE', log, ENDED_LIFE_S)
      ended[#ended + 1] = job
      local state = costs[event] and read_state(job)
      if state then settle(state, costs[event]) end
    end
  end
end

for feed = 1, num_feeds do
  if #batches[feed] > 0 then send(KEYS[9 + feed], batches[feed]) end
end
for _, job in ipairs(ended) do drop_job(job) end
return refused
