-- Stored bytes of a tenant by name. Part of every script, after common.lua.
--
-- ledger  sorted set: name by expiry (queue time, Unix seconds)
-- sizes   hash: name -> bytes; '' -> total
-- charge  ARGV[9] name  ARGV[10] bytes  ARGV[11] TTL (ms)  ARGV[12] quota or ''  ARGV[13] queue's share or ''
-- Scripts that charge have ledger and sizes as KEYS[10..11], may return charge_tenant's refusal, and first drop expired
-- names.

local TRIM_AT_ONCE, TRIM_ROUNDS = 256, 16

local function trim_ledger(ledger, sizes)
  local now = now_s()
  for _ = 1, TRIM_ROUNDS do
    local gone = redis.call('ZRANGEBYSCORE', ledger, '-inf', now, 'LIMIT', 0, TRIM_AT_ONCE)
    if #gone == 0 then return end
    local freed = 0
    for _, bytes in ipairs(redis.call('HMGET', sizes, unpack(gone))) do freed = freed + tonumber(bytes or '0') end
    redis.call('ZREM', ledger, unpack(gone))
    redis.call('HDEL', sizes, unpack(gone))
    redis.call('HINCRBY', sizes, '', -freed)
  end
end

local function bytes_of(sizes, name)
  return tonumber(redis.call('HGET', sizes, name) or '0')
end

-- Return {-2, bytes in use, limit} if `more` bytes exceed the memory outside the queue's share, else nil.
local function no_memory(more, queue_share)
  local told = redis.call('INFO', 'memory')
  local function field(name) return tonumber(string.match(told, '\n' .. name .. ':(%d+)') or '0') end
  local most = field('maxmemory')
  if most == 0 then most = field('total_system_memory') end
  local used, bound = field('used_memory') - field('mem_not_counted_for_evict'), math.floor(most * (1 - queue_share))
  return used + more > bound and {-2, used, bound} or nil
end

-- Charge `change` bytes for `life_ms`. Return nil, or the refusal {-1, bytes, limit} beyond `quota`, {-2, bytes, limit}
-- beyond `queue_share`; '' is no limit. A smaller size is never refused.
local function charge_tenant(ledger, sizes, name, change, life_ms, quota, queue_share)
  trim_ledger(ledger, sizes)
  change = math.max(change, -bytes_of(sizes, name))
  if change > 0 then
    local all = bytes_of(sizes, '')
    if quota ~= '' and all + change > tonumber(quota) then return {-1, all, tonumber(quota)} end
    local full = queue_share ~= '' and no_memory(change, tonumber(queue_share))
    if full then return full end
  end
  redis.call('HINCRBY', sizes, name, change)
  redis.call('HINCRBY', sizes, '', change)
  redis.call('ZADD', ledger, now_s() + life_ms / 1000, name)
  for _, key in ipairs({ledger, sizes}) do
    if redis.call('PTTL', key) < tonumber(life_ms) then redis.call('PEXPIRE', key, life_ms) end
  end
end

local function release_name(ledger, sizes, name)
  if redis.call('HEXISTS', sizes, name) == 0 then return end
  redis.call('HINCRBY', sizes, '', -bytes_of(sizes, name))
  redis.call('HDEL', sizes, name)
  redis.call('ZREM', ledger, name)
end

