-- Read records.
for n = 1, #KEYS do tell(n, call('GET', KEYS[n])) end
