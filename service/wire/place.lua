-- Tells how many of its tenant's own jobs go before a waiting one.
--
-- last ARGV: job
-- Returns the number, or nil for one that does not wait.

local job = ARGV[#ARGV]
local state = read_state(job)
return state and state.queue == WAITING and place(job, state) or nil
