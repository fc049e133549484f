"""The demo: a payments service under a retry storm, with and without protection.

storm    the plan: transfers, deliveries and kills, all from one seed. Pure.
bank     the books: accounts and a ledger in a SQLite file of its own
worker   one process of the service
broker   delivers, kills, replaces and redelivers
audit    what the ledger says happened. Reads the bank alone, never the library's own counters.
drawing  the live line and the table
report   the figures of a run, and how they are told
play     both storms and their audit
command  the arguments of ``effectonce demo``
"""
