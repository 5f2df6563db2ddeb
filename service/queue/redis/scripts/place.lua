-- Tells how many of its tenant's own jobs go before a waiting one.
--
-- ARGV[9] job
-- Returns the number, or nil for one that does not wait.

local job = ARGV[9]
local state = read_state(job)
return state and state.queue == WAITING and place(job, state) or nil
