"""The client's side of a session: numbers, the window, acknowledgements, and the journal that survives kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from effectonce import Receiver
from effectonce.errors import BadRequest, Fenced, KeyReused, StoreMismatch, UsageError, WindowExceeded
from effectonce.sessions import ClientSession, Journal, Opened, Request, Sessions
from effectonce.testing.clocks import wait_until

OPENED = Opened("c" * 32, 1, 0, 60.0, 3)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "session.db")


def test_numbers_follow_one_another_and_the_mark_is_below_what_is_waited_for() -> None:
    """Whatever the order of the answers."""
    session = ClientSession(OPENED)
    one, two, three = (session.begin() for _ in range(3))
    assert [(r.number, r.acked, r.epoch) for r in (one, two, three)] == [(1, 0, 1), (2, 0, 1), (3, 0, 1)]
    session.done(two)
    assert (session.acked, session.outstanding) == (0, [1, 3])
    session.done(one)
    assert session.again(three) == three._replace(acked=2)
    session.give_up(three)
    four = session.begin()
    assert (session.acked, four.number) == (3, 4)
    session.give_up(4)
    assert session.acked == 4


def test_a_full_window_is_waited_for() -> None:
    """Until the lowest is answered: that alone makes room."""
    session = ClientSession(OPENED)
    requests = [session.begin() for _ in range(3)]
    session.done(requests[2])
    assert not session.is_quick
    with pytest.raises(WindowExceeded, match="from 1 on"):
        session.begin(wait=0.01)
    got: list[Request] = []
    waiting = threading.Thread(target=lambda: got.append(session.begin(wait=30)))
    waiting.start()
    session.done(requests[0])
    waiting.join(30)
    assert (got[0].number, got[0].acked) == (4, 1)


def test_a_block_acknowledges_its_request_unless_it_raises() -> None:
    """Then it stays outstanding, to be sent again or given up."""
    session = ClientSession(OPENED)
    with session.request("a") as request:
        assert session.outstanding == [1]
    with pytest.raises(OSError, match="lost"), session.request("b") as request:
        raise OSError("lost")
    assert (session.acked, session.outstanding) == (1, [2])
    session.done(request)
    session.done(request)
    with pytest.raises(UsageError, match="answered or given up"):
        session.again(request)


def test_a_place_travels_in_headers() -> None:
    """In any case, as text or bytes; what makes no sense is refused."""
    request = Request("c" * 32, 7, 3, {"cents": 5}, 2)
    assert request.headers == {
        "Client-Id": "c" * 32, "Request-Number": "7", "Acked-Through": "3", "Client-Epoch": "2",
    }  # fmt: skip
    lower: dict[str, Any] = {name.lower(): value.encode() for name, value in request.headers.items()}
    assert Request.from_headers(lower, {"cents": 5}) == request
    del lower["client-epoch"]
    assert Request.from_headers(lower).epoch == 1
    for missing in list(lower):
        with pytest.raises(BadRequest):
            Request.from_headers({name: value for name, value in lower.items() if name != missing})


def test_a_message_of_a_broker_is_one_of_a_session() -> None:
    """Its headers are all it takes: the consumer gives them to its sessions."""
    with Receiver("memory://") as receiver:
        sessions = Sessions(receiver)
        session = ClientSession(sessions.open())
        sent = session.begin({"cents": 500})
        message = (dict(sent.headers), {"cents": 500})
        delivered = [Request.from_headers(message[0], message[1]) for _ in range(2)]
        outcomes = [
            sessions.process(request, lambda request: request.payload["cents"]) for request in delivered
        ]
        assert [(outcome.value, outcome.replayed) for outcome in outcomes] == [(500, False), (500, True)]
        sessions.close()


# The journal


def test_a_restarted_client_goes_on_with_its_numbers(journal: Journal) -> None:
    """What was begun and not answered is in doubt, and holds the mark; names find their number."""
    session = ClientSession(OPENED, journal=journal)
    session.done(session.begin("a", name="first"), {"receipt": 1})
    session.begin("b", name="second")
    session.begin("c")
    assert journal.client == OPENED.client
    restarted = ClientSession(OPENED._replace(epoch=2), journal=Journal(journal.path))
    assert [(e.number, e.name, e.payload) for e in restarted.in_doubt()] == [
        (2, "second", "b"),
        (3, None, "c"),
    ]
    again = restarted.begin("b", name="second")
    assert (again.number, again.acked, again.epoch) == (2, 1, 2)
    assert restarted.begin("d", name="fourth").number == 4
    assert restarted.answer_to("first") == {"receipt": 1}
    with pytest.raises(UsageError, match="answered as request 1"):
        restarted.begin("a", name="first")
    with pytest.raises(KeyReused):
        restarted.begin("other", name="second")
    with pytest.raises(KeyError):
        restarted.answer_to("second")
    restarted.done(again)
    (third,) = [entry for entry in restarted.in_doubt() if entry.name is None]
    restarted.give_up(third)
    assert (restarted.acked, restarted.outstanding) == (3, [4])


def test_a_resumed_session_needs_its_journal() -> None:
    """Without it a number could be used for two requests, and the second would get the first one's answer."""
    with pytest.raises(UsageError, match="journal"):
        ClientSession(OPENED._replace(epoch=2))
    session = ClientSession(OPENED)
    session.begin()
    session.resumed(OPENED._replace(epoch=2))
    assert (session.begin().number, session.epoch) == (2, 2)


def test_a_twin_on_the_same_journal_counts_no_further(journal: Journal) -> None:
    """Whoever resumes last has the numbers, also before the server says so."""
    first = ClientSession(OPENED, journal=journal)
    first.begin()
    second = ClientSession(OPENED._replace(epoch=2), journal=Journal(journal.path))
    with pytest.raises(Fenced, match="resumed"):
        first.begin()
    assert second.begin().number == 2


def test_a_twin_of_the_same_epoch_counts_no_further(journal: Journal) -> None:
    """It would not know the other's numbers, and acknowledge what the other waits for."""
    first, second = (ClientSession(OPENED, journal=journal) for _ in range(2))
    assert first.begin().number == 1
    with pytest.raises(Fenced, match="Another ClientSession"):
        second.begin()
    assert (first.begin().number, len(journal.in_doubt())) == (2, 2)


def test_a_fenced_client_settles_nothing_in_the_journal(journal: Journal) -> None:
    """What it was told is not what its successor waits for."""
    first = ClientSession(OPENED, journal=journal)
    request = first.begin("a", name="invoice")
    second = ClientSession(OPENED._replace(epoch=2), journal=journal)
    with pytest.raises(Fenced, match="resumed"):
        first.done(request, "late")
    with pytest.raises(Fenced, match="resumed"):
        first.give_up(request)
    assert [entry.name for entry in second.in_doubt()] == ["invoice"]


def test_a_forked_process_needs_a_session_of_its_own() -> None:
    """Else parent and child would give one number to two requests, and one of them would never happen."""
    session = ClientSession(OPENED)
    request = session.begin()
    child = os.fork()
    if child == 0:
        refused = 0
        for again in (False, True):
            try:
                session.again(request) if again else session.begin()
            except UsageError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert session.begin().number == 2


def test_threads_that_begin_one_name_get_one_number(journal: Journal) -> None:
    """Whoever comes first, also when they waited for room."""
    session = ClientSession(OPENED._replace(window=1), journal=journal)
    first = session.begin()
    got: list[Request] = []
    threads = [threading.Thread(target=lambda: got.append(session.begin("a", name="a"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    session.done(first)
    for thread in threads:
        thread.join(30)
    assert [request.number for request in got] == [2, 2, 2, 2]


def test_a_session_that_is_over_is_settled_by_hand_in_its_journal(journal: Journal) -> None:
    """There is no session to say it to; then the journal is free for another one."""
    session = ClientSession(OPENED, journal=journal)
    session.begin("a", name="paid")
    session.begin("b", name="not paid")
    with pytest.raises(UsageError, match=r"settle\(entry.number"):
        journal.forget()
    paid, not_paid = journal.in_doubt()
    journal.settle(paid.number, "by the books")
    journal.settle(not_paid.number, given_up=True)
    journal.forget()
    session = ClientSession(OPENED._replace(client="d" * 32), journal=journal)
    assert session.answer_to("paid") == "by the books"
    assert session.begin("b", name="not paid").number == 1


def test_a_journal_belongs_to_one_session(journal: Journal, tmp_path: Path) -> None:
    """Another one's is refused, until nothing is in doubt and it is forgotten."""
    session = ClientSession(OPENED, journal=journal)
    request = session.begin("a", name="first")
    other = OPENED._replace(client="d" * 32)
    with pytest.raises(UsageError, match="another session"):
        ClientSession(other, journal=journal)
    with pytest.raises(UsageError, match="in doubt"):
        journal.forget()
    session.done(request)
    journal.forget()
    assert journal.client is None
    following = ClientSession(other, journal=journal)
    assert following.begin("b", name="second").number == 1
    with pytest.raises(UsageError, match="answered"):
        following.begin("a", name="first")
    journal.forget("first")
    assert following.begin("a", name="first").number == 2
    with pytest.raises(UsageError, match="no journal"):
        ClientSession(OPENED).begin(name="x")
    (tmp_path / "other.db").write_bytes(b"something else, and long enough to be looked at" * 30)
    with pytest.raises(StoreMismatch):
        Journal(tmp_path / "other.db")


VICTIM = """
import os, signal, sys
from effectonce.sessions import ClientSession, Journal, Opened

session = ClientSession(Opened("c" * 32, 1, 0, 60.0, 100), journal=Journal(sys.argv[1]))
for number in range(1, 100):
    request = session.begin({"n": number}, name=f"request {number}")
    print(number, flush=True)
    if number == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    session.done(request, number)
"""


@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_killed_client_finds_what_is_in_doubt(journal: Journal, number: int) -> None:
    """The request whose number was given out, and nothing else; no number is given out twice."""
    words = [sys.executable, "-c", VICTIM, str(journal.path), str(number)]
    died = subprocess.run(words, capture_output=True, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    session = ClientSession(OPENED._replace(epoch=2, window=100), journal=journal)
    assert [entry.payload for entry in session.in_doubt()] == [{"n": number}]
    assert session.begin().number == number + 1
    assert session.acked == number - 1


def test_threads_share_a_session(journal: Journal) -> None:
    """Each gets numbers of its own, and in the end all are acknowledged."""
    session = ClientSession(OPENED._replace(window=4), journal=journal)
    numbers: list[int] = []

    def work() -> None:
        for _ in range(5):
            request = session.begin()
            numbers.append(request.number)
            session.done(request)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: not any(thread.is_alive() for thread in threads))
    assert sorted(numbers) == list(range(1, 16))
    assert session.acked == 15
