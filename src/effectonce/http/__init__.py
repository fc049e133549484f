"""HTTP: the Idempotency-Key boundary of ``asgi``, ``wsgi``, ``fastapi``, ``django`` and ``flask``; ``client``, ``webhooks``."""

from ._boundary import Request, Route, nothing_happened, remember
from ._exchange import PUBLIC

__all__ = ["PUBLIC", "Request", "Route", "nothing_happened", "remember"]
