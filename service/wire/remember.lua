-- Keeps the record of a request, unless another one holds its idempotency key.
--
-- KEYS[10] {quire}:{<id>}:request       string, the record
-- KEYS[11] {quire}:idempotency:<hash>   string, the id of the request that came first under a client's key; only with one
-- ARGV[9] the record   ARGV[10] its life (s)   ARGV[11] the request's id   ARGV[12], ARGV[13] what stands before and behind
-- an id in the key of its record
-- Returns the id of the request that holds the key: this one's where no other does, or where the other's record is gone.

local record, life, id, before, behind = unpack(ARGV, 9, 13)
if KEYS[11] then
  local holder = redis.call('GET', KEYS[11])
  if holder and holder ~= id and redis.call('EXISTS', before .. holder .. behind) == 1 then return holder end
  redis.call('SET', KEYS[11], id, 'EX', life)
end
redis.call('SET', KEYS[10], record, 'EX', life)
return id
