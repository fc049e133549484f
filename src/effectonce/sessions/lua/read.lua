-- Read a request. Argument: number.
return answer(1, redis.call('HGET', key, ARGV[1]))
