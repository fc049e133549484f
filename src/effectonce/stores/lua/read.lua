-- Read a record.
return found()
