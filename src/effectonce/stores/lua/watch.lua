-- Ask to be told when a record that is held changes.
-- Argument: its holder.
local value, head = held(KEYS[1], ARGV[1])
if head == 164 then value = call('SETRANGE', KEYS[1], '0', '\165') end
if not head or type(value) == 'table' then tell(1, value) end
