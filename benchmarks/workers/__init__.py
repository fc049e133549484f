"""One module per contender. Each imports only the standard library and its contender, as in that environment."""
