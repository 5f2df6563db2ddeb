-- ARGV[9] job
-- Returns how many of its tenant's jobs precede a waiting one, else nil.

local job = ARGV[9]
local state = read_state(job)
return state and state.queue == WAITING and place(job, state) or nil
