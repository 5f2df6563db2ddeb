-- Drop what is stored under a name.
--
-- KEYS[10] ledger  KEYS[11] sizes  KEYS[12..] its keys  ARGV[9] name

release_name(KEYS[10], KEYS[11], ARGV[9])
for i = 12, #KEYS do redis.call('DEL', KEYS[i]) end
return {1}
