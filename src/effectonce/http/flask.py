"""Flask: ``Idempotency(app, receiver, scope=…)``, an extension that stands around the app's ``wsgi_app``.

    idempotency = Idempotency(scope=lambda request: current_user.get_id())
    idempotency.init_app(app, receiver)              # or a store's URL in app.config["EFFECTONCE_STORE"]

    @app.post("/payments")
    @idempotency.rules(keep="7d")                    # what a view says of itself goes first
    def pay(): ...

    @app.post("/search")
    @idempotency.exempt
    def search(): ...

Functions before and after a request can't do this: a streamed response would be on its way before it is recorded. So
the extension is the WSGI middleware, which looks up a request's view to ask for its rules. The scope function runs in a
request context of its own, so that ``session``, ``request`` and what builds on them say who is calling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, Unpack

from .._receiver import Receiver
from ..errors import MissingExtra, UsageError
from . import _wishes
from ._exchange import PUBLIC
from ._rules import Route, Rules, RuleWords, Scope, mark, mark_of
from .wsgi import Environ, IdempotencyMiddleware, method_of, path_of, request_of

try:
    import flask
    from werkzeug.exceptions import HTTPException
except ImportError as error:
    raise MissingExtra("effectonce.http.flask needs Flask: pip install 'effectonce[flask]'.") from error

__all__ = ["Idempotency"]

View = TypeVar("View", bound=Callable[..., Any])

STORE = "EFFECTONCE_STORE"
"""The setting with the URL of the store, for an app that is given no receiver."""


class Idempotency:
    """Every covered request of an app happens once. ``scope``, ``routes`` and further words: as for WSGI."""

    def __init__(
        self,
        app: flask.Flask | None = None,
        receiver: Receiver | None = None,
        *,
        scope: Scope,
        routes: Iterable[Route] = (),
        **rules: Unpack[RuleWords],
    ) -> None:
        self._receiver = receiver
        self._words = {"scope": scope, "routes": list(routes), **rules}
        if app is not None:
            self.init_app(app)

    def init_app(self, app: flask.Flask, receiver: Receiver | None = None) -> None:
        """Stand around an app."""
        if "effectonce" in app.extensions:
            raise UsageError("This app has an Idempotency already. A second one would wait for the first.")
        receiver = receiver or self._receiver
        if receiver is None and STORE not in app.config:
            raise UsageError(f'Give Idempotency a receiver, or the app a store: app.config["{STORE}"].')
        if receiver is None:
            receiver = Receiver(app.config[STORE])
        app.wsgi_app = _Middleware(app, receiver, self._words)  # type: ignore[method-assign]
        app.extensions["effectonce"] = self
        flask.got_request_exception.connect(_hear, app)

    def rules(self, **rules: Unpack[RuleWords]) -> Callable[[View], View]:
        """Decorate a view with rules of its own: ``@idempotency.rules(keep="7d")``."""
        return lambda view: mark(view, **rules)

    def exempt(self, view: View) -> View:
        """Decorate a view whose requests are not covered."""
        return mark(view, covered=False)


class _Middleware(IdempotencyMiddleware):
    """The WSGI middleware, inside which an app is at home."""

    def __init__(self, app: flask.Flask, receiver: Receiver, words: dict[str, Any]) -> None:
        super().__init__(app.wsgi_app, receiver, **words)
        self._flask = app

    def rules_for(self, environ: Environ) -> Rules | None:
        """The rules for a request, by its view and its path."""
        method = method_of(environ)
        if not self.boundary.concerns(method):
            return None
        return self.boundary.rules_for(method, path_of(environ), mark_of(self._view(environ)))

    def scope_of(self, environ: Environ) -> Any:
        """Whose key a request has, as the app would know it."""
        if not callable(self.boundary.scope):
            return PUBLIC
        context = self._flask.request_context(environ)
        with context:
            return self.boundary.scope_of(request_of(environ)._replace(raw=context.request))

    def _view(self, environ: Environ) -> Any:
        """The view that a request is for; None if there is none, which is for the app to say."""
        try:
            request = self._flask.request_class(environ, populate_request=False, shallow=True)
            found = self._flask.create_url_adapter(request)
            return None if found is None else self._flask.view_functions.get(found.match()[0])
        except HTTPException:
            return None


def _hear(sender: flask.Flask, exception: BaseException | None = None, **_: Any) -> None:
    """A view raised what no handler of the app knows, and Flask makes a plain 500 of it."""
    _wishes.raised(exception)
