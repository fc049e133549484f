-- Add events to the stream KEYS[1], in order. ARGV: the stream's greatest length or "", then for each event its key or
-- "", how many fields and values follow, and these. After a failure no later event of the same key is added, which a
-- pipeline of commands could not promise. Returns the failures: the event's number and the error.
local stuck, failed, add = {}, {}, redis.pcall
local stream, longest, at, number, count = KEYS[1], ARGV[1], 2, 0, #ARGV
while at <= count do
    local key, last = ARGV[at], at + 1 + ARGV[at + 1]
    number = number + 1
    if not stuck[key] then
        local reply
        if longest == '' then
            reply = add('XADD', stream, '*', unpack(ARGV, at + 2, last))
        else
            reply = add('XADD', stream, 'MAXLEN', '~', longest, '*', unpack(ARGV, at + 2, last))
        end
        if type(reply) == 'table' and reply.err then
            failed[#failed + 1] = number .. ' ' .. reply.err
            stuck[key] = key ~= ''
        end
    end
    at = last + 1
end
return failed
