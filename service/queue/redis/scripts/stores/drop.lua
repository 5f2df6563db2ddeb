-- Drop a name's charge, and its keys KEYS[12..].

release_name(KEYS[10], KEYS[11], ARGV[9])
for i = 12, #KEYS do redis.call('DEL', KEYS[i]) end
return {1}
