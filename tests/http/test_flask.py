"""The Flask extension: how it is set up, what views say of themselves, and how it feels in an app's own tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from flask import Blueprint, Flask, Response, abort, g, request, session, stream_with_context
from flask.views import MethodView

from effectonce import Receiver, current
from effectonce.errors import UsageError
from effectonce.http import PUBLIC, Request, Route
from effectonce.http.flask import Idempotency

KEY = {"Idempotency-Key": "key"}


@pytest.fixture
def app() -> Flask:
    """An app whose views count their runs."""
    app = Flask("shop")
    app.secret_key = "nobody's"
    app.runs = 0  # type: ignore[attr-defined]

    @app.post("/pay")
    def pay() -> tuple[dict[str, Any], int]:
        return {"number": count(app), "json": request.get_json(silent=True)}, 201

    return app


def count(app: Any) -> int:
    """One run more."""
    app.runs += 1
    return int(app.runs)


@pytest.fixture
def idempotency(app: Flask) -> Idempotency:
    return Idempotency(app, Receiver("memory://"), scope=PUBLIC)


def test_an_app_that_is_made_by_a_factory_is_set_up_later(app: Flask) -> None:
    """The extension first, the app then; the store's URL is a setting."""
    idempotency = Idempotency(scope=PUBLIC)
    app.config["EFFECTONCE_STORE"] = "memory://"
    idempotency.init_app(app)
    answers = [app.test_client().post("/pay", json={"cents": 5}, headers=KEY) for _ in range(2)]
    assert [answer.json for answer in answers] == [{"number": 1, "json": {"cents": 5}}] * 2
    assert answers[1].headers["X-Idempotency-Replayed"] == "true"


def test_one_extension_serves_several_apps(app: Flask) -> None:
    """As every extension does; each has its own store."""
    other = Flask("other")
    other.add_url_rule("/pay", view_func=lambda: "other", methods=["POST"])
    idempotency = Idempotency(scope=PUBLIC)
    idempotency.init_app(app, Receiver("memory://"))
    idempotency.init_app(other, Receiver("memory://"))
    assert app.test_client().post("/pay", headers=KEY).status_code == 201
    assert other.test_client().post("/pay", headers=KEY).text == "other"


def test_a_store_is_needed(app: Flask) -> None:
    """From somewhere."""
    with pytest.raises(UsageError, match="EFFECTONCE_STORE"):
        Idempotency(app, scope=PUBLIC)


def test_a_second_extension_is_a_mistake(app: Flask, idempotency: Idempotency) -> None:
    """It would claim the same keys again, and refuse every request as a repeat."""
    with pytest.raises(UsageError, match="already"):
        idempotency.init_app(app, Receiver("memory://"))


def test_a_view_says_its_own_rules(app: Flask, idempotency: Idempotency) -> None:
    """In either order with the route; its word goes before that of its path."""

    @app.post("/maybe")
    @idempotency.rules(required=False)
    def maybe() -> str:
        return f"{count(app)}"

    @idempotency.rules(methods={"PUT"}, replayed_header="Again")
    @app.put("/put")
    def put() -> str:
        return f"{count(app)}"

    client = app.test_client()
    assert client.post("/maybe").text == "1"
    assert [client.put("/put", headers=KEY).text for _ in range(2)] == ["2", "2"]
    assert client.put("/put", headers=KEY).headers["Again"] == "true"


def test_a_view_can_be_exempt(app: Flask, idempotency: Idempotency) -> None:
    """It runs every time, with a key or without."""

    @app.post("/search")
    @idempotency.exempt
    def search() -> str:
        return f"{count(app)}"

    assert [app.test_client().post("/search", headers=KEY).text for _ in range(2)] == ["1", "2"]


def test_only_some_views_can_be_covered(app: Flask) -> None:
    """Everything excepted by a route, and views that say otherwise, with the rest of the route's words."""
    routes = [Route("/**", covered=False, replayed_header="Again")]
    idempotency = Idempotency(app, Receiver("memory://"), scope=PUBLIC, routes=routes)

    @app.post("/covered")
    @idempotency.rules()
    def covered() -> str:
        return f"{count(app)}"

    client = app.test_client()
    assert [client.post("/pay").json["number"] for _ in range(2)] == [1, 2]  # type: ignore[index]
    assert client.post("/covered").status_code == 400
    assert [client.post("/covered", headers=KEY).text for _ in range(2)] == ["3", "3"]
    assert client.post("/covered", headers=KEY).headers["Again"] == "true"


def test_blueprints_and_classes_say_their_rules_too(app: Flask, idempotency: Idempotency) -> None:
    """Wherever a view function ends up."""
    blueprint = Blueprint("api", __name__, url_prefix="/api")

    class Orders(MethodView):
        decorators = [idempotency.exempt]  # noqa: RUF012 — Flask's own way

        def post(self, number: int) -> str:
            return f"{number} {count(app)}"

    blueprint.add_url_rule("/orders/<int:number>", view_func=Orders.as_view("orders"))
    app.register_blueprint(blueprint)
    assert [app.test_client().post("/api/orders/7").text for _ in range(2)] == ["7 1", "7 2"]


def test_a_misspelt_rule_is_told_where_it_is_said(idempotency: Idempotency) -> None:
    """With the words there are."""
    with pytest.raises(UsageError, match="kep: no such rule"):
        idempotency.rules(kep="7d")(lambda: "")
    with pytest.raises(UsageError, match="is for ASGI"):
        idempotency.rules(claim="handler")(lambda: "")


def test_a_scope_function_knows_the_session(app: Flask) -> None:
    """It runs in a request context: what says who is calling works there, as in a view."""

    def caller(asked: Request) -> Any:
        assert asked.raw.path == request.path
        return session.get("user")

    Idempotency(app, Receiver("memory://"), scope=caller)
    answers = []
    for user in ("ann", "bob", "ann", None):
        client = app.test_client()
        with client.session_transaction() as login:
            login["user"] = user
        answers.append(client.post("/pay", headers=KEY))
    assert [answer.status_code for answer in answers] == [201, 201, 201, 403]
    assert [answer.json["number"] for answer in answers[:3]] == [1, 2, 1]  # type: ignore[index]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_scope_function_may_read_the_body(app: Flask, chunked: bool) -> None:
    """Which is there for the view as if nobody had, and counts as what was asked."""
    Idempotency(app, Receiver("memory://"), scope=lambda _: request.get_json()["merchant"])

    def pay(document: bytes) -> Any:
        unknown = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(document))}
        return app.test_client().post(
            "/pay",
            input_stream=BytesIO(document),
            content_type="application/json",
            headers=KEY | unknown,
            environ_overrides={"wsgi.input_terminated": chunked},
        )

    first, other = pay(b'{"merchant": "m", "cents": 5}'), pay(b'{"merchant": "m", "cents": 999}')
    assert (first.status_code, first.json["json"]["cents"], other.status_code) == (201, 5, 422)


def test_a_scope_function_leaves_nothing_behind(app: Flask) -> None:
    """Its context is its own: the view starts with a new one, and the body is unread."""

    def caller(asked: Request) -> str:
        g.seen = "by the scope function"
        return asked.raw.headers["X-User"]

    @app.post("/seen")
    def seen() -> str:
        return f"{g.get('seen')} {request.get_data(as_text=True)}"

    Idempotency(app, Receiver("memory://"), scope=caller)
    assert app.test_client().post("/seen", data="body", headers={**KEY, "X-User": "ann"}).text == "None body"


def test_a_view_knows_its_attempt(app: Flask, idempotency: Idempotency) -> None:
    """In the view, before it, after it, and in what it streams."""
    seen: list[str] = []
    app.before_request(lambda: seen.append(current().key))

    @app.post("/stream")
    def stream() -> Response:
        def pieces() -> Iterator[str]:
            seen.append(current().key)
            yield request.args["word"]

        return Response(stream_with_context(pieces()))

    assert app.test_client().post("/stream?word=hello", headers=KEY).text == "hello"
    assert seen == ["public|http||key"] * 2


def test_a_path_that_is_not_there_is_the_apps_answer(app: Flask, idempotency: Idempotency) -> None:
    """404 and 405 come from the app, under the general rules."""
    client = app.test_client()
    assert client.post("/nowhere", headers=KEY).status_code == 404
    assert client.patch("/pay", headers={"Idempotency-Key": "other"}).status_code == 405
    assert client.get("/nowhere").status_code == 404


def test_cookies_of_the_first_answer_are_not_given_again(app: Flask, idempotency: Idempotency) -> None:
    """A repeat logs nobody in."""

    @app.post("/login")
    def login() -> str:
        session["user"] = "ann"
        return "hello"

    answers = [app.test_client().post("/login", headers=KEY) for _ in range(2)]
    assert ["Set-Cookie" in answer.headers for answer in answers] == [True, False]
    assert [answer.text for answer in answers] == ["hello", "hello"]


def test_exceptions_reach_a_test_client_as_they_are(app: Flask, idempotency: Idempotency) -> None:
    """With ``TESTING`` they go through; without, Flask makes a 500 of them. The key is free in both cases."""

    @app.post("/bug")
    def bug() -> str:
        count(app)
        raise ZeroDivisionError("a bug")

    assert app.test_client().post("/bug", headers=KEY).status_code == 500
    app.testing = True
    with pytest.raises(ZeroDivisionError, match="a bug"):
        app.test_client().post("/bug", headers=KEY)
    assert app.runs == 2  # type: ignore[attr-defined]


def test_a_refusal_by_abort_is_an_answer(app: Flask, idempotency: Idempotency) -> None:
    """Remembered as any other of its status."""

    @app.post("/no")
    def no() -> str:
        abort(409 if count(app) == 1 else 404)

    assert [app.test_client().post("/no", headers=KEY).status_code for _ in range(2)] == [409, 409]


def test_without_flask_the_extra_is_named(tmp_path: Path) -> None:
    """``effectonce.http.flask`` is imported by who uses Flask; who hasn't got it is told what to install."""
    code = (
        "import sys; sys.modules['flask'] = None\n"
        "from effectonce.errors import MissingExtra\n"
        "try: import effectonce.http.flask\n"
        "except MissingExtra as error: print(error)\n"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "effectonce[flask]" in output
