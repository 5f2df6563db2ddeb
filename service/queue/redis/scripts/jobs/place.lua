-- Return the number of the tenant's jobs ahead of a waiting job, or nil.

local job = ARGV[9]
local state = read_state(job)
return state and state.queue == WAITING and place(job, state) or nil
