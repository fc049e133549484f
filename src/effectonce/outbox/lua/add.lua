-- Add events to the stream KEYS[1], in order. ARGV: the stream's greatest length or "", then for each event its key or
-- "", how many fields and values follow, and these. After a failure no later event of the same key is added, which a
-- pipeline of commands could not promise. Returns the failures: the event's number and the error.
local stuck, failed = {}, {}
local longest, at, number = ARGV[1], 2, 0
while at <= #ARGV do
    local key, last = ARGV[at], at + 1 + tonumber(ARGV[at + 1])
    number = number + 1
    if not stuck[key] then
        local reply
        if longest == '' then
            reply = redis.pcall('XADD', KEYS[1], '*', unpack(ARGV, at + 2, last))
        else
            reply = redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', longest, '*', unpack(ARGV, at + 2, last))
        end
        if type(reply) == 'table' and reply.err then
            failed[#failed + 1] = number .. ' ' .. reply.err
            stuck[key] = key ~= ''
        end
    end
    at = last + 1
end
return failed
