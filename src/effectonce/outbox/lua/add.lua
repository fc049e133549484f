-- Add events to the stream KEYS[1], in order. ARGV: the stream's greatest length or "", then for each event its key or
-- "", its id, its payload and its headers or "". After a failure no later event of the same key is added, which a
-- pipeline of commands could not promise. Returns the failures: the event's number and the error.
local stream, longest = KEYS[1], ARGV[1]
local stuck, failed, call = {}, {}, redis.pcall

local function add(key, id, payload, headers)
    if longest == '' and headers == '' then -- nearly always, and a table would take as long as the rest
        if key == '' then
            return call('XADD', stream, '*', 'id', id, 'payload', payload)
        end
        return call('XADD', stream, '*', 'id', id, 'key', key, 'payload', payload)
    end
    local command = longest == '' and {'XADD', stream, '*'} or {'XADD', stream, 'MAXLEN', '~', longest, '*'}
    for name, value in pairs({id = id, key = key, payload = payload, headers = headers}) do
        if value ~= '' or name == 'payload' then
            command[#command + 1] = name
            command[#command + 1] = value
        end
    end
    return call(unpack(command))
end

for at = 2, #ARGV, 4 do
    local key = ARGV[at]
    if not stuck[key] then
        local reply = add(key, ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
        if type(reply) == 'table' and reply.err then
            failed[#failed + 1] = (at - 2) / 4 .. ' ' .. reply.err
            stuck[key] = key ~= ''
        end
    end
end
return failed
