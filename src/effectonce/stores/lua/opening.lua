-- Every script begins so: each takes one step on any number of keys, by one look at the server's clock, in microseconds.
-- How records look is told in _redis_records.py; 164 begins one that is pending, 165 one whose end somebody waits for.
-- What goes wrong with one key is that key's answer, and nobody else's.
local call, byte, sub, pack = redis.pcall, string.byte, string.sub, struct.pack
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local answers
