"""HTTP: the Idempotency-Key boundary of servers (``asgi``, ``wsgi`` and frameworks), ``client`` and ``webhooks``."""

from ._boundary import no_store, nothing_happened, remember
from ._exchange import PUBLIC
from ._rules import Request, Route

__all__ = ["PUBLIC", "Request", "Route", "no_store", "nothing_happened", "remember"]
