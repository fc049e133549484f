"""Django in atomic mode: a request's record and answer are in the transaction of what its view does.

Instead of ``effectonce.http.django.IdempotencyMiddleware``, with the same setting ``EFFECTONCE``, whose store has to be
the database of Django's default connection. Every covered request runs inside ``transaction.atomic()``: its key is
claimed there, and the response is given to the server when it is committed. A response of 5xx undoes what the view did.
"""

from __future__ import annotations

from typing import Any

from ._boundary import Exchange
from ._django_streams import read_now
from ._exchange import Answer, start_of
from .atomic import AtomicExchange
from .django import IdempotencyMiddleware, _Covered  # first: without Django it says what to install

# isort: split
from django.db import connection, transaction  # type: ignore[import-untyped]

__all__ = ["AtomicMiddleware"]


class AtomicMiddleware(IdempotencyMiddleware):
    """Every covered request happens once, in a transaction. For stacks without an event loop, as Django's ORM is."""

    async_capable = False

    @property
    def _covered(self) -> type[_Covered]:
        return _AtomicCovered


class _AtomicCovered(_Covered):
    async def _run(self, key: str | None) -> Any:
        block: Any = transaction.atomic()
        with block:
            return await super()._run(key)

    async def _collect(self, response: Any) -> tuple[Answer, Any]:
        said, rest = await super()._collect(response)
        if rest is not None and said.body is None and not start_of(said.status, said.headers).endless:
            rest = read_now(rest)  # what it does while it is made is in the transaction, too
        return said, rest

    def _exchange_for(self, key: str, scope: str) -> Exchange:
        on = self._boundary.receiver.on(connection)
        return AtomicExchange(self._boundary, self._rules, on, key, scope, lines=self._lines)
