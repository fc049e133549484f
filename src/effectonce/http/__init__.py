"""HTTP: the Idempotency-Key boundary of servers (``asgi``, ``wsgi`` and frameworks), ``client`` and ``webhooks``."""

from ._exchange import PUBLIC
from ._rules import Request, Route
from ._wishes import no_store, nothing_happened, remember

__all__ = ["PUBLIC", "Request", "Route", "no_store", "nothing_happened", "remember"]
