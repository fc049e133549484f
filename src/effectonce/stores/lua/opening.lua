-- Every step begins so: what is there, and the server's clock in microseconds. How records look is told in
-- _redis_records.py; 164 begins one that is pending, 165 one whose end somebody waits for.
local call, key = redis.call, KEYS[1]
local value = call('GET', key)
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
