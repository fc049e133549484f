-- Ask to be told when a record that is held changes.
-- Argument: its holder.
if head == 164 then call('SETRANGE', key, 0, '\165') end
return 1
