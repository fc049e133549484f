"""Measures effectonce against the raw limit of each store and against its rivals, in turns on the same machine."""
