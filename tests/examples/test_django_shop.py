"""The shop of the examples: what its README says, and its books, on servers of both colours and through ``kill -9``."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Self

import httpx
import pytest
from tests.examples.running import Example, ExampleServer

from effectonce.http.client import replayed
from effectonce.testing.clocks import wait_until

MIGRATE = "python manage.py migrate --run-syncdb"
WSGI = "python manage.py runserver --noreload 8000"
ASGI = "uvicorn shop.asgi:application --port 8000"
HASTY = """
from effectonce import Policy
from shop.settings import *

EFFECTONCE = {**EFFECTONCE, "policy": Policy.payments(lease="1s")}
"""
"""Settings with a short lease, so that nobody waits long for the keys of a killed process."""
MORTAL = """
import os, signal
from hasty import *

def die_after(get_response):
    def respond(request):
        response = get_response(request)
        if request.method == "POST":
            os.kill(os.getpid(), signal.SIGKILL)
        return response
    return respond

MIDDLEWARE = [*MIDDLEWARE, "mortal.die_after"]
"""
"""Settings of a process that dies after the view, before its answer is recorded."""

Servers = dict[str, ExampleServer]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    made = Example("django_shop", tmp_path_factory.mktemp("shop"))
    (made.folder / "hasty.py").write_text(HASTY)
    (made.folder / "mortal.py").write_text(MORTAL)
    made.run(MIGRATE)
    ask(made, "INSERT INTO shop_item (name, price, stock) VALUES ('chair', 50, 100), ('relic', 900, 1)")
    return made


@pytest.fixture(scope="module")
def servers(example: Example) -> Iterator[Servers]:
    """Two processes on one store and one database: one with threads, one with an event loop."""
    with example.serve(WSGI) as wsgi, example.serve(ASGI) as asgi:
        yield {"wsgi": wsgi, "asgi": asgi}


def ask(example: Example, question: str, *values: object) -> list[tuple[object, ...]]:
    """Ask the shop's database itself."""
    with closing(sqlite3.connect(example.folder / "shop.db", timeout=20)) as file, file:
        return file.execute(question, values).fetchall()


def sold(example: Example, item: str) -> tuple[int, int]:
    """How many orders of an item there are, and how many are left."""
    question = """SELECT count(shop_order.number), stock FROM shop_item
                  LEFT JOIN shop_order ON item_id = shop_item.id WHERE name = ? GROUP BY shop_item.id"""
    (count, stock) = ask(example, question, item)[0]
    assert isinstance(count, int)
    assert isinstance(stock, int)
    return count, stock


class Browser:
    """Somebody with a session and the front page open."""

    def __init__(self, server: ExampleServer) -> None:
        self._client = httpx.Client(base_url=server.url, timeout=60)
        self.get, self.post = self._client.get, self._client.post

    def __enter__(self) -> Self:
        self._client.__enter__()
        page = self.get("/").raise_for_status().text
        self._forms = [
            dict(re.findall(r'name="(\w+)" value="([^"]*)"', form)) for form in page.split("<form")[1:]
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    def form(self, item: str) -> dict[str, str]:
        """The form of an item, as the page has it."""
        return next(form for form in self._forms if form["item"] == item)


def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    """They run as they stand there, and the audit finds each order once."""
    example = Example("django_shop", tmp_path)
    install, migrate, serve, storm = example.commands
    example.run(install)
    example.run(migrate)
    with example.serve(serve) as server:
        said = example.run(storm, server.url)
    assert "12 shoppers, 120 requests, 96 got the first answer again" in said
    assert "orders: 24 placed, 24 shown; lamps: 24 sold for 477.60" in said


def test_a_server_killed_in_the_middle_of_the_storm(example: Example, servers: Servers) -> None:
    """Two servers of both colours, one of them killed: whoever clicks on sees one order all the same."""
    with (
        example.serve(WSGI, {"DJANGO_SETTINGS_MODULE": "hasty"}) as mortal,
        ThreadPoolExecutor(1) as pool,
    ):
        storm = f"python manage.py storm {mortal.url} {servers['asgi'].url}"
        running = pool.submit(example.run, storm)
        wait_until(lambda: running.done() or count(example) >= 6)
        mortal.kill()
        said = running.result()
    assert "orders: 24 placed, 24 shown; lamps: 24 sold for 477.60" in said


def count(example: Example) -> int:
    return len(
        ask(example, "SELECT 1 FROM shop_order JOIN shop_item ON item_id = shop_item.id WHERE name = 'lamp'")
    )


@pytest.mark.parametrize("serve", [WSGI, ASGI], ids=["wsgi", "asgi"])
def test_killed_between_the_order_and_its_record(serve: str, example: Example, servers: Servers) -> None:
    """The order is committed, nobody has the answer: the next click takes over, and finds it placed."""
    orders, stock = sold(example, "chair")
    with Browser(servers["wsgi"]) as browser:
        form = browser.form("chair")
        with (
            example.serve(serve, {"DJANGO_SETTINGS_MODULE": "mortal"}) as mortal,
            pytest.raises(httpx.TransportError),
        ):
            browser.post(f"{mortal.url}/checkout", data=form)
        assert sold(example, "chair") == (orders + 1, stock - 1)
        clicks = [browser.post(f"{servers[colour].url}/checkout", data=form) for colour in ("asgi", "wsgi")]
        assert [(click.status_code, replayed(click)) for click in clicks] == [(302, False), (302, True)]
        assert clicks[0].headers["location"] == clicks[1].headers["location"]
        assert browser.get(clicks[0].headers["location"]).text == "1 x chair: 50.00"
    assert sold(example, "chair") == (orders + 1, stock - 1)


def test_a_form_belongs_to_its_shopper(example: Example, servers: Servers) -> None:
    """The key of another session's form is another order, and never shows the first one."""
    orders, _ = sold(example, "chair")
    with Browser(servers["wsgi"]) as one, Browser(servers["asgi"]) as other:
        mine = one.post("/checkout", data=one.form("chair"))
        yours = other.post("/checkout", data=other.form("chair") | {"key": one.form("chair")["key"]})
        assert mine.headers["location"] != yours.headers["location"]
        assert other.get(mine.headers["location"]).status_code == 404
    assert sold(example, "chair")[0] == orders + 2


def test_a_refusal_is_an_answer(example: Example, servers: Servers) -> None:
    """Sold out stays sold out for its form, in either process; the failed order leaves nothing behind."""
    with Browser(servers["wsgi"]) as first, Browser(servers["asgi"]) as late:
        assert first.post("/checkout", data=first.form("relic")).status_code == 302
        answers = [late.post(f"{each.url}/checkout", data=late.form("relic")) for each in servers.values()]
    assert [(answer.status_code, answer.text, replayed(answer)) for answer in answers] == [
        (400, "Sold out.", False),
        (400, "Sold out.", True),
    ]
    assert sold(example, "relic") == (1, 0)


@pytest.mark.parametrize("colour", ["wsgi", "asgi"])
def test_what_is_refused_before_a_view_runs(colour: str, example: Example, servers: Servers) -> None:
    """No session or one made up, no key, the key of another order: each has its problem, and nothing is ordered."""
    before, url = sold(example, "chair"), f"{servers[colour].url}/api/orders"
    with Browser(servers[colour]) as browser:
        key = {"Idempotency-Key": browser.form("chair")["key"]}
        order = {"item": "chair", "quantity": 1}
        stranger = httpx.post(url, json=order, headers=key, timeout=60)
        liar = httpx.post(url, json=order, headers=key | {"Cookie": f"sessionid={'a' * 32}"}, timeout=60)
        keyless = browser.post(url, json=order)
        formless = browser.post("/checkout", data={"item": "chair", "quantity": 1})
        assert [each.json()["code"] for each in (stranger, liar, keyless, formless)] == [
            "scope-missing",
            "scope-missing",
            "key-missing",
            "key-missing",
        ]
        assert sold(example, "chair") == before
        assert browser.post(url, json=order, headers=key).json()["total"] == "50.00"
        assert browser.post(url, json=order | {"quantity": 2}, headers=key).json()["code"] == "key-reused"
    assert sold(example, "chair") == (before[0] + 1, before[1] - 1)
