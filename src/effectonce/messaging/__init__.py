"""Messages: each broker's own client, around which a handler's effects happen once. One file per broker.

Import the one you use: ``from effectonce.messaging import redis_streams``. What to tell a broker is decided in
``_delivery``, for all of them.
"""
