"""The payments service of the examples: what its README says, and the money, through retries and ``kill -9``."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.examples.running import Example, ExampleServer

from effectonce.http.client import IdempotencyTransport, Rules, replayed
from effectonce.testing.clocks import wait_until

SERVE = "uvicorn app:app --port 8000"
SECRET = base64.b64decode("dGhlIGJhbmsncyBzZWNyZXQsIGZvciBkZW1vcw==")
HASTY = """
from effectonce import Policy
Policy.payments = classmethod(lambda cls, **words: cls(**{**words, "keep": "48h", "lease": "1s"}))
from app import app
"""
"""The service with a short lease, so that nobody waits long for the keys of a killed process."""
MORTAL = """
import os, signal
import hasty
import app as service
from app import app

book = service.ledger.book

def book_and_die(entry):
    book(entry)
    os.kill(os.getpid(), signal.SIGKILL)

service.ledger.book = book_and_die
"""
"""The service in a process that dies after the effect, before its answer is recorded."""

Servers = tuple[ExampleServer, ExampleServer]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    made = Example("payments_api", tmp_path_factory.mktemp("payments"))
    (made.folder / "hasty.py").write_text(HASTY)
    (made.folder / "mortal.py").write_text(MORTAL)
    return made


@pytest.fixture(scope="module")
def servers(example: Example) -> Iterator[Servers]:
    """Two processes on one store and one ledger."""
    with example.serve(SERVE) as one, example.serve(SERVE) as other:
        yield one, other


def lines_of(example: Example, *references: str) -> list[tuple[str, int]]:
    """What the ledger has of these references, in cents: the money itself."""
    with closing(sqlite3.connect(example.folder / "ledger.db")) as file:
        found = file.execute("SELECT reference, cents FROM lines ORDER BY reference")
        return [line for line in found if line[0] in references]


def ask(
    server: ExampleServer,
    reference: str,
    amount: str = "5.00",
    caller: str = "sk_acme",
    transport: httpx.BaseTransport | None = None,
) -> httpx.Response:
    """Ask for a payment, once. Its reference is the key, too."""
    headers = {"X-API-Key": caller, "Idempotency-Key": f'"{reference}"'}
    with httpx.Client(base_url=server.url, transport=transport, headers=headers, timeout=30) as client:
        return client.post("/payments", json={"amount": amount, "reference": reference})


def pay(
    server: ExampleServer, reference: str, amount: str = "5.00", caller: str = "sk_acme"
) -> httpx.Response:
    """Ask for a payment until there is an answer."""
    rules = Rules(backoff="50ms", poll="100ms")
    return ask(server, reference, amount, caller, IdempotencyTransport(rules=rules))


def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    """They run as they stand there: ten invoices through a flaky connection are ten payments, also the second time."""
    example = Example("payments_api", tmp_path)
    install, serve, client = example.commands
    example.run(install)
    with example.serve(serve) as server:
        first, second = example.run(client, server.url), example.run(client, server.url)
    assert 0 < first.count("the first answer, again") < 10  # some answers were lost
    assert second.count("the first answer, again") == 10
    assert first.splitlines()[-1].endswith("10 payments, 64.90 paid")
    assert second.splitlines()[-1].endswith("10 payments, 64.90 paid")


def test_racing_duplicates_in_two_processes_are_one_payment(example: Example, servers: Servers) -> None:
    """Each payment is asked for four times at once, in both processes: one line, one receipt."""
    references = [f"race-{uuid4()}" for _ in range(10)]
    with ThreadPoolExecutor(8) as pool:
        asked = [(server, reference) for reference in references for server in servers * 2]
        answers = list(pool.map(lambda each: pay(*each), asked))
    receipts = [{answer.content for answer in answers[n : n + 4]} for n in range(0, len(answers), 4)]
    assert {answer.status_code for answer in answers} == {201}
    assert [len(same) for same in receipts] == [1] * len(references)
    assert lines_of(example, *references) == [(reference, 500) for reference in sorted(references)]


def test_a_process_killed_in_the_middle_of_the_traffic(example: Example, servers: Servers) -> None:
    """Whoever loses its server asks the other one, with the same key: every payment is made, and made once."""
    references = [f"storm-{number:03}-{uuid4()}" for number in range(40)]

    def pay_somewhere(reference: str) -> int:
        try:
            return ask(mortal, reference, "1.25").status_code
        except httpx.TransportError:
            return pay(servers[0], reference, "1.25").status_code

    with example.serve("uvicorn hasty:app --port 8000") as mortal, ThreadPoolExecutor(8) as pool:
        pending = pool.map(pay_somewhere, references)
        wait_until(lambda: len(lines_of(example, *references)) >= 8)
        mortal.kill()
        assert set(pending) == {201}
    assert lines_of(example, *references) == [(reference, 125) for reference in references]


def test_killed_between_the_payment_and_its_record(example: Example, servers: Servers) -> None:
    """The ledger has the line, nobody has the answer: a retry takes over after the lease, and books the same line."""
    reference = f"killed-{uuid4()}"
    with example.serve("uvicorn mortal:app --port 8000") as mortal, pytest.raises(httpx.TransportError):
        ask(mortal, reference, "7.77")
    assert lines_of(example, reference) == [(reference, 777)]
    other = pay(servers[1], reference, "8.88")
    assert (other.status_code, other.json()["code"]) == (422, "key-reused")
    answers = [pay(server, reference, "7.77") for server in servers]
    assert [(answer.status_code, replayed(answer)) for answer in answers] == [(201, False), (201, True)]
    assert answers[0].json() == answers[1].json()
    assert lines_of(example, reference) == [(reference, 777)]


def test_keys_belong_to_merchants(example: Example, servers: Servers) -> None:
    """The same key of two merchants is two payments; and without an API key there is no answer, old or new."""
    reference = f"mine-{uuid4()}"
    mine, yours = (pay(servers[0], reference, caller=caller) for caller in ("sk_acme", "sk_globex"))
    nobody = pay(servers[0], reference, caller="sk_nobody")
    assert (mine.status_code, yours.status_code, nobody.status_code) == (201, 201, 401)
    assert mine.json()["id"] != yours.json()["id"]
    assert lines_of(example, reference) == [(reference, 500)] * 2


def test_a_refusal_is_an_answer(example: Example, servers: Servers) -> None:
    """What was declined stays declined for its key, in either process."""
    reference = f"large-{uuid4()}"
    answers = [pay(server, reference, "1000.01") for server in servers]
    assert [(answer.status_code, replayed(answer)) for answer in answers] == [(402, False), (402, True)]
    assert lines_of(example, reference) == []


def signed(event: dict[str, str], secret: bytes = SECRET) -> tuple[bytes, dict[str, str]]:
    """An event as the bank sends it."""
    body, now = json.dumps(event).encode(), str(int(time.time()))
    content = f"{event['id']}.{now}.".encode() + body
    signature = base64.b64encode(hmac.digest(secret, content, hashlib.sha256)).decode()
    return body, {"webhook-id": event["id"], "webhook-timestamp": now, "webhook-signature": f"v1,{signature}"}


def test_a_webhook_happens_once_and_only_when_it_is_signed(example: Example, servers: Servers) -> None:
    """Five deliveries of a chargeback to both processes take the money back once; a forged one is refused."""
    reference = f"regret-{uuid4()}"
    payment = pay(servers[0], reference, "9.99").json()["id"]
    event = {"id": f"evt-{uuid4()}", "type": "chargeback", "payment": payment}

    def deliver(server: ExampleServer, secret: bytes = SECRET) -> httpx.Response:
        body, headers = signed(event, secret)
        return httpx.post(f"{server.url}/webhooks/bank", content=body, headers=headers, timeout=30)

    forged = deliver(servers[0], b"guessed")
    answers = [deliver(server) for server in (*servers, *servers, servers[0])]
    assert (forged.status_code, forged.json()) == (401, {"detail": "No signature fits the body."})
    assert {(answer.status_code, answer.text) for answer in answers} == {(200, answers[0].text)}
    back = f"chargeback of {payment}"
    assert lines_of(example, reference, back) == [(back, -999), (reference, 999)]


@pytest.mark.parametrize("store", ["valkey", "postgres"])
def test_another_store(store: str, example: Example, request: pytest.FixtureRequest) -> None:
    """``EFFECTONCE_STORE`` is all there is to change."""
    reference = f"{store}-{uuid4()}"
    with example.serve(SERVE, {"EFFECTONCE_STORE": request.getfixturevalue(store).url}) as server:
        answers = [pay(server, reference) for _ in range(2)]
    assert [(answer.status_code, replayed(answer)) for answer in answers] == [(201, False), (201, True)]
    assert lines_of(example, reference) == [(reference, 500)]


def test_it_keeps_to_its_document(servers: Servers) -> None:
    """Whatever is sent, it is answered as OpenAPI says; the key and the problems of the boundary are in there."""
    url = servers[0].url
    document = httpx.get(f"{url}/openapi.json", timeout=30).json()
    operation = document["paths"]["/payments"]["post"]
    assert "Idempotency-Key" in {each["name"] for each in operation["parameters"]}
    assert "application/problem+json" in operation["responses"]["409"]["content"]
    assert "Idempotency-Key" not in str(document["paths"]["/webhooks/bank"])

    @given(case=schemathesis.openapi.from_dict(document)["/payments"]["POST"].as_strategy())
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        response = case.call(base_url=url, session=session, headers={"X-API-Key": "sk_acme"})
        # The pattern that pydantic gives for decimals also fits texts that are none.
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    with requests.Session() as session:
        check()
