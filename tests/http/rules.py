"""Every rule of the HTTP boundary, seen from the client's side, for whatever server and framework is behind.

``class TestMine(HttpRules)`` with a fixture ``site`` runs them. What a framework can't do, its site says in ``lacks``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.http.apps.kitchen import HUGE, LEASE_SECONDS, PIECE_SIZE, PIECES, SMALL_REQUEST, SMALL_RESPONSE
from tests.http.site import Reply, Site

NOT_A_KEY = [
    "",
    " ",
    '""',
    '"  "',
    '"open',
    'open"',
    '"a"b"',
    r'"a\b"',
    "a b",
    "a,b",
    '"tab\there"',
    '"umlaut \xfc"',
]
REMEMBERED = ["200", "202", "204", "303", "400", "401", "402", "404", "409"]
NOT_YET = ["408", "425", "429"]


def changing(name: str) -> bool:
    """Whether a header may differ between the first answer and a repeat, whoever sends it."""
    return name in ("date", "server", "connection", "keep-alive", "transfer-encoding", "content-length")


def remembered_part(reply: Reply) -> list[tuple[str, str]]:
    """The headers that every repeat has to have, in their order."""
    held_back = ("set-cookie", "www-authenticate", "x-idempotency-replayed")
    return [pair for pair in reply.headers if not changing(pair[0]) and pair[0] not in held_back]


class HttpRules:
    """One test for each thing that a rule says. A key is the name of its effect, too."""

    # 1. Methods

    @pytest.mark.parametrize("method", ["POST", "PATCH"])
    def test_rule_01_post_and_patch_happen_once(self, site: Site, method: str) -> None:
        """The covered methods: one effect, the first answer for every repeat."""
        key = site.new()
        first, second = (
            site.send(method, f"/plain/pay?n={key}", [("Idempotency-Key", key)], b"5 EUR") for _ in range(2)
        )
        assert (first.status, first.replayed) == (201, False)
        assert (second.status, second.replayed, second.body) == (201, True, first.body)
        assert site.world.count(key) == 1

    @pytest.mark.parametrize("method", ["PUT", "DELETE"])
    def test_rule_01_put_and_delete_happen_once_when_asked(self, site: Site, method: str) -> None:
        """Without being asked they pass through; a route can ask."""
        for rules, effects in (("plain", 2), ("all", 1)):
            key = site.new()
            for _ in range(2):
                site.send(method, f"/{rules}/pay?n={key}", [("Idempotency-Key", key)])
            assert site.world.count(key) == effects

    def test_rule_01_get_passes_through_untouched(self, site: Site) -> None:
        """With a key or without, and streamed to its last byte."""
        name = site.new()
        for headers in ([], [("Idempotency-Key", name)], [("Idempotency-Key", '"no key')]):
            reply = site.send("GET", f"/plain/pieces?n={name}", headers)
            assert (reply.status, len(reply.body)) == (200, PIECES * PIECE_SIZE)
            assert reply.one("idempotency-key") is None
        assert site.world.count(name) == 3

    def test_rule_01_get_of_more_than_can_be_held(self, site: Site) -> None:
        """The cap is for what is remembered, not for what passes."""
        reply = site.send("GET", f"/plain/huge?n={site.new()}")
        assert (reply.status, len(reply.body)) == (200, HUGE)

    @pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
    def test_rule_01_head_and_options_pass_through_untouched(self, site: Site, method: str) -> None:
        """They ask for nothing to happen."""
        reply = site.send(method, f"/plain/200?n={site.new()}", [("Idempotency-Key", '"no key')])
        assert reply.status in (200, 204)
        assert reply.one("idempotency-key") is None

    def test_rule_01_uncovered_route_passes_through_untouched(self, site: Site) -> None:
        """A POST that a route excepts runs every time, its body unread and its answer unheld."""
        name = site.new()
        body = b"x" * (2 * SMALL_REQUEST)
        replies = [
            site.send("POST", f"/uncovered/pay?n={name}", [("Idempotency-Key", "a b")], body)
            for _ in range(2)
        ]
        assert [reply.status for reply in replies] == [201, 201]
        assert b" %d " % len(body) in replies[0].body
        assert site.world.count(name) == 2

    # 2. The key's syntax

    def test_rule_02_a_string_and_a_bare_token_name_the_same_record(self, site: Site) -> None:
        """As the specification writes it, and as many clients send it."""
        key = site.new()
        path = f"/plain/pay?n={key}"
        first = site.send("POST", path, [("Idempotency-Key", f'"{key}"')])
        second = site.send("POST", path, [("Idempotency-Key", key)])
        assert (first.replayed, second.replayed, site.world.count(key)) == (False, True, 1)

    def test_rule_02_escapes_are_part_of_the_spelling_only(self, site: Site) -> None:
        """A backslash before a quote or a backslash; the key comes back as a string."""
        name = site.new()
        spelt = rf'"{name}\"\\"'
        first = site.send("POST", f"/plain/pay?n={name}", [("Idempotency-Key", spelt)])
        second = site.send("POST", f"/plain/pay?n={name}", [("Idempotency-Key", f"  {spelt} ")])
        assert (first.status, second.replayed, second.one("idempotency-key")) == (201, True, spelt)

    @pytest.mark.parametrize("line", NOT_A_KEY)
    def test_rule_02_what_is_no_key_is_refused(self, site: Site, line: str) -> None:
        """Blank, unterminated, with characters that no key has: 400, and nothing runs."""
        name = site.new()
        reply = site.send("POST", f"/plain/pay?n={name}", [("Idempotency-Key", line)])
        assert reply.status == 400
        assert site.world.count(name) == 0

    @pytest.mark.parametrize("lines", [("a", "b"), ('"a"', '"b"'), ("same", "same"), ("", "a")])
    def test_rule_02_two_lines_are_refused(self, site: Site, lines: tuple[str, str]) -> None:
        """Nobody can tell which is meant."""
        name = site.new()
        reply = site.send("POST", f"/plain/pay?n={name}", [("Idempotency-Key", line) for line in lines])
        assert (reply.status, site.world.count(name)) == (400, 0)

    def test_rule_02_a_key_has_255_characters_at_most(self, site: Site) -> None:
        """255 are a key, 256 are none."""
        name = site.new()
        for length, status in ((255, 201), (256, 400)):
            reply = site.send("POST", f"/plain/pay?n={name}", [("Idempotency-Key", name.ljust(length, "x"))])
            assert reply.status == status
        assert site.world.count(name) == 1

    def test_rule_02_strict_takes_the_string_only(self, site: Site) -> None:
        """A route can insist on the specification."""
        key = site.new()
        assert site.send("POST", f"/strict/pay?n={key}", [("Idempotency-Key", key)]).code == "key-invalid"
        assert site.post("/strict/pay", key).status == 201

    # 3. No key

    def test_rule_03_a_missing_key_is_refused(self, site: Site) -> None:
        """400, with a link to where clients can read about it; nothing runs."""
        name = site.new()
        reply = site.send("POST", f"/plain/pay?n={name}")
        assert (reply.status, reply.code, site.world.count(name)) == (400, "key-missing", 0)
        assert 'rel="describedby"' in (reply.one("link") or "")

    def test_rule_03_optional_passes_through_without_a_key(self, site: Site) -> None:
        """And happens once with one."""
        name = site.new()
        assert [site.send("POST", f"/optional/pay?n={name}").status for _ in range(2)] == [201, 201]
        assert site.world.count(name) == 2
        first, second = site.twice("/optional/pay", site.new())
        assert (first.replayed, second.replayed) == (False, True)

    @pytest.mark.parametrize("dish", ["secret", "undone"])
    def test_rule_03_what_a_handler_says_of_its_answer_is_no_mistake_without_a_key(
        self, site: Site, dish: str
    ) -> None:
        """Where none is required: there is nothing to remember, and nothing to give back."""
        assert site.send("POST", f"/optional/{dish}?n={site.new()}").status == 200

    def test_rule_03_a_natural_key_stands_in_for_a_missing_one(self, site: Site) -> None:
        """Made by the function that the user names, and told to the client."""
        name = site.new()
        first, second = (
            site.send("POST", f"/natural/pay?n={name}", body=b"order " + name.encode()) for _ in range(2)
        )
        assert (first.one("idempotency-key"), second.replayed) == (f'"{name}"', True)
        assert site.world.count(name) == 1

    def test_rule_03_natural_keys_beyond_ascii_stay_apart(self, site: Site) -> None:
        """Whatever a header can carry, two orders never become one."""
        name = site.new()
        for order in ("ä", "ö"):
            body = f"order {order}{name}".encode()
            assert site.send("POST", f"/natural/pay?n={name}", body=body).status == 201
        assert site.world.count(name) == 2

    def test_rule_03_a_request_that_has_no_natural_key_either_is_refused(self, site: Site) -> None:
        """Keys are never guessed."""
        name = site.new()
        assert site.send("POST", f"/natural/pay?n={name}", body=b"nothing").code == "key-missing"
        assert site.world.count(name) == 0

    # 4. Identity

    def test_rule_04_same_key_on_another_path_is_422(self, site: Site) -> None:
        """Not a second execution."""
        key = site.new()
        assert site.post("/plain/pay", key).status == 201
        assert (site.post("/plain/200", key).code, site.world.count(key)) == ("key-reused", 1)

    def test_rule_04_same_key_with_another_query_is_422(self, site: Site) -> None:
        """The query says what is asked, too."""
        key = site.new()
        assert site.post("/plain/pay", key).status == 201
        reply = site.send("POST", f"/plain/pay?n={key}&more=1", [("Idempotency-Key", key)])
        assert (reply.status, reply.code, site.world.count(key)) == (422, "key-reused", 1)

    def test_rule_04_same_key_with_another_method_is_422(self, site: Site) -> None:
        """And so does the method."""
        key = site.new()
        assert site.post("/plain/pay", key).status == 201
        reply = site.send("PATCH", f"/plain/pay?n={key}", [("Idempotency-Key", key)])
        assert (reply.status, reply.code, site.world.count(key)) == (422, "key-reused", 1)

    def test_rule_04_same_key_of_another_caller_is_another_effect(self, site: Site) -> None:
        """Nobody sees another's answer, nor is refused because of it."""
        key = site.new()
        replies = [site.post("/plain/pay", key, b"", ("X-Caller", who)) for who in ("ann", "bob", "ann")]
        assert [reply.replayed for reply in replies] == [False, False, True]
        assert replies[2].body == replies[0].body != replies[1].body
        assert site.world.count(key) == 2

    @pytest.mark.parametrize("caller", ["", "\x85"])
    def test_rule_04_a_caller_without_a_name_is_refused(self, site: Site, caller: str) -> None:
        """A scope function that yields nothing, or what no name can have, refuses the request."""
        key = site.new()
        reply = site.post("/plain/pay", key, b"", ("X-Caller", caller))
        assert (reply.status, reply.code, site.world.count(key)) == (403, "scope-missing", 0)
        assert reply.one("idempotency-key") == f'"{key}"'

    def test_rule_04_a_path_counts_as_the_app_sees_it(self, site: Site) -> None:
        """However its characters are escaped, which a proxy on the way may change."""
        key = site.new()
        paths = (f"/plain/p%61y?n={key}", f"/plain/pay?n={key}")
        replies = [site.send("POST", path, [("Idempotency-Key", key)]) for path in paths]
        assert [(reply.status, reply.replayed) for reply in replies] == [(201, False), (201, True)]
        assert site.world.count(key) == 1

    def test_rule_04_authorisation_runs_before_replay(self, site: Site) -> None:
        """Whoever may not call does not get a remembered answer either."""
        key = site.new()
        assert site.post("/plain/pay", key).status == 201
        assert site.post("/plain/pay", key, b"", ("X-Caller", "")).code == "scope-missing"
        assert site.post("/plain/pay", key).replayed

    def test_rule_04_long_credentials_are_a_name_as_well(self, site: Site) -> None:
        """Longer than a key's parts can be, and still apart."""
        key = site.new()
        replies = [site.post("/plain/pay", key, b"", ("X-Caller", "x" * 1000 + end)) for end in "aba"]
        assert [reply.replayed for reply in replies] == [False, False, True]

    # 5. What was asked

    def test_rule_05_same_key_with_another_body_is_422(self, site: Site) -> None:
        """One byte is enough."""
        key = site.new()
        assert site.post("/plain/pay", key, b"5 EUR").status == 201
        assert (site.post("/plain/pay", key, b"6 EUR").code, site.world.count(key)) == ("key-reused", 1)

    def test_rule_05_headers_are_no_part_of_it(self, site: Site) -> None:
        """A client may change its agent, its trace and its content type's spelling."""
        key = site.new()
        assert site.post("/plain/pay", key, b"5 EUR", ("User-Agent", "one")).status == 201
        assert site.post("/plain/pay", key, b"5 EUR", ("User-Agent", "two"), ("X-Trace", "7")).replayed

    def test_rule_05_json_counts_by_what_it_says(self, site: Site) -> None:
        """When asked: spacing and order don't matter, values do."""
        key = site.new()
        assert site.post("/json/pay", key, b'{"cents": 500, "to": "ann"}').status == 201
        assert site.post("/json/pay", key, b'{"to":"ann","cents":500}').replayed
        assert site.post("/json/pay", key, b'{"to":"ann","cents":501}').code == "key-reused"

    def test_rule_05_a_mismatch_is_told_before_waiting(self, site: Site) -> None:
        """The wrong request does not wait for the right one's end."""
        key = site.new()
        site.world.hold(key)
        running = site.begin_post("/wait/pay", key, b"5 EUR")
        site.world.wait_for(key)
        assert site.post("/wait/pay", key, b"6 EUR").code == "key-reused"
        site.world.let_go(key)
        assert running.reply().status == 201

    # 6. In flight

    @pytest.mark.parametrize(("rules", "status"), [("plain", 409), ("early", 425), ("accepted", 202)])
    def test_rule_06_a_repeat_of_a_running_request_is_told_to_come_back(
        self, site: Site, rules: str, status: int
    ) -> None:
        """With the time after which it is worth it, from what is left of the lease."""
        key = site.new()
        site.world.hold(key)
        running = site.begin_post(f"/{rules}/pay", key)
        site.world.wait_for(key)
        reply = site.post(f"/{rules}/pay", key)
        site.world.let_go(key)
        assert (reply.status, reply.code) == (status, "in-progress")
        assert 100 < int(reply.one("retry-after") or 0) <= 120
        assert (running.reply().status, site.world.count(key)) == (201, 1)

    def test_rule_06_a_repeat_can_wait_for_the_answer(self, site: Site) -> None:
        """It gets what the first one gets."""
        key = site.new()
        site.world.hold(key)
        running = site.begin_post("/wait/pay", key)
        site.world.wait_for(key)
        waiting = site.begin_post("/wait/pay", key)
        site.world.let_go(key)
        first, second = running.reply(), waiting.reply()
        assert (first.replayed, second.replayed, second.body) == (False, True, first.body)
        assert site.world.count(key) == 1

    def test_rule_06_who_waits_runs_when_the_first_gives_up(self, site: Site) -> None:
        """A released key is free for whoever asked for it meanwhile."""
        key = site.new()
        site.world.hold(key)
        running = site.begin_post("/wait/500", key)
        site.world.wait_for(key)
        waiting = site.begin_post("/wait/500", key)
        site.world.let_go(key)
        assert (running.reply().body, waiting.reply().body) == (b"number 1", b"number 2")

    def test_rule_06_a_lease_is_renewed_while_the_handler_runs(self, site: Site) -> None:
        """However long it takes: nobody takes over."""
        key = site.new()
        site.world.hold(key)
        running = site.begin_post("/lease/pay", key)
        site.world.wait_for(f"renewed {key}", 3)  # after a third of the lease each
        waiting = site.begin_post("/lease/pay", key)
        site.world.wait_for(f"renewed {key}", 4)
        site.world.let_go(key)
        assert (running.reply().status, waiting.reply().replayed, site.world.count(key)) == (201, True, 1)

    def test_rule_06_many_at_once_are_one(self, site: Site) -> None:
        """Several keys, five requests for each, on all processes and threads of the server."""
        keys = [site.new() for _ in range(8)]
        with ThreadPoolExecutor(5) as pool:
            replies = list(pool.map(lambda key: site.post("/wait/pay", key), keys * 5))
        assert {site.world.count(key) for key in keys} == {1}
        for at, key in enumerate(keys):
            mine = replies[at :: len(keys)]
            assert {(reply.status, reply.body) for reply in mine} == {(201, mine[0].body)}, key
            assert sum(not reply.replayed for reply in mine) == 1

    # 7. The replay

    def test_rule_07_a_repeat_has_the_same_status_body_and_headers(self, site: Site) -> None:
        """In their order; what belongs to one connection, moment or login is held back."""
        first, second = site.twice("/plain/headers", site.new())
        assert (second.status, second.body) == (first.status, first.body)
        assert remembered_part(second) == remembered_part(first)
        assert (first.one("location"), second.one("location")) == ("/payments/1", "/payments/1")
        assert first.all("set-cookie") and not second.all("set-cookie")
        assert first.all("www-authenticate") and not second.all("www-authenticate")

    def test_rule_07_repeated_headers_stay_repeated(self, site: Site) -> None:
        """Two lines of a name are two lines again."""
        if "repeated headers" in site.lacks:
            pytest.skip("a response of this framework has one line for each header")
        first, second = site.twice("/plain/headers", site.new())
        assert first.all("x-part") == second.all("x-part") == ["first", "second"]

    def test_rule_07_an_answer_says_its_key_and_scripts_may_read_it(self, site: Site) -> None:
        """On the first answer and on every repeat; that it is a repeat, too."""
        key = site.new()
        for reply, replayed in zip(site.twice("/plain/pay", key), (None, "true"), strict=True):
            assert (reply.one("idempotency-key"), reply.one("x-idempotency-replayed")) == (
                f'"{key}"',
                replayed,
            )
            exposed = ", ".join(reply.all("access-control-expose-headers"))
            assert "Idempotency-Key" in exposed and "X-Idempotency-Replayed" in exposed

    def test_rule_07_a_key_is_echoed_as_it_was_sent(self, site: Site) -> None:
        """A bare token stays bare, for clients that compare; a repeat gets its own form back."""
        name = site.new()
        for sent in (name, f'"{name}"', name):
            reply = site.send("POST", f"/plain/200?n={name}", [("Idempotency-Key", sent)])
            assert (reply.status, reply.one("idempotency-key")) == (200, sent)

    def test_rule_07_the_header_of_replays_can_have_another_name(self, site: Site) -> None:
        """Such as Stripe's."""
        _, second = site.twice("/stripe/pay", site.new())
        assert (second.one("idempotent-replayed"), second.one("x-idempotency-replayed")) == ("true", None)

    def test_rule_07_a_header_that_would_inject_another_is_never_remembered(self, site: Site) -> None:
        """It is the handler's error, and a repeat gets no injected header either."""
        for reply in site.twice("/plain/inject", site.new()):
            assert (reply.status, reply.one("x-injected")) == (500, None)

    # 8. What is remembered

    @pytest.mark.parametrize("status", REMEMBERED)
    def test_rule_08_an_answer_is_remembered(self, site: Site, status: str) -> None:
        """Every success, every redirection and every refusal that stays one."""
        key = site.new()
        first, second = site.twice(f"/plain/{status}", key)
        assert (first.status, second.status, second.body) == (int(status), int(status), first.body)
        assert (first.replayed, second.replayed, site.world.count(key)) == (False, True, 1)

    @pytest.mark.parametrize("status", NOT_YET)
    def test_rule_08_a_refusal_of_the_moment_is_not_remembered(self, site: Site, status: str) -> None:
        """A retry is what it asks for."""
        key = site.new()
        first, second = site.twice(f"/plain/{status}", key)
        assert (first.status, second.status, second.replayed) == (int(status), int(status), False)
        assert site.world.count(key) == 2

    def test_rule_08_further_refusals_are_not_remembered_when_asked(self, site: Site) -> None:
        """Whoever had no valid token repeats the request with a new one; what else was said of refusals holds."""
        for status, count in (("401", 2), ("429", 2), ("402", 1)):
            key = site.new()
            first, second = site.twice(f"/challenge/{status}", key)
            assert (first.status, second.status, second.replayed) == (int(status), int(status), count == 1)
            assert site.world.count(key) == count

    @pytest.mark.parametrize("what", ["500", "503", "raise", "break-off"])
    def test_rule_08_a_fault_releases_the_key(self, site: Site, what: str) -> None:
        """A status from 500 on, an exception, an exception in the middle of the answer: a retry may run again."""
        key = site.new()
        first, second = site.twice(f"/plain/{what}", key)
        assert first.status >= 500 and second.status >= 500
        assert (second.replayed, site.world.count(key)) == (False, 2)

    @pytest.mark.parametrize("what", ["500", "raise"])
    def test_rule_08_a_fault_can_be_remembered(self, site: Site, what: str) -> None:
        """As the answer that it is."""
        key = site.new()
        first, second = site.twice(f"/remember/{what}", key)
        assert (first.status, second.status, second.body) == (500, 500, first.body)
        assert (second.replayed, site.world.count(key)) == (True, 1)

    @pytest.mark.parametrize("what", ["500", "raise"])
    def test_rule_08_a_fault_can_leave_a_doubt(self, site: Site, what: str) -> None:
        """Then nothing runs until somebody has looked into it."""
        key = site.new()
        first, second = site.twice(f"/doubt/{what}", key)
        assert first.status == 500
        assert (second.status, second.code, site.world.count(key)) == (409, "outcome-unknown", 1)

    def test_rule_08_a_policy_can_know_the_type_of_an_exception(self, site: Site) -> None:
        """A time-out leaves a doubt, where the policy says so, though the framework makes a plain 500 of it."""
        if "types" in site.lacks:
            pytest.skip("this framework's handler hides exceptions")
        key = site.new()
        first, second = site.twice("/types/time-out", key)
        assert (first.status, second.code, site.world.count(key)) == (500, "outcome-unknown", 1)
        assert site.twice("/types/raise", site.new())[1].code is None

    def test_rule_08_a_handler_can_raise_that_nothing_happened(self, site: Site) -> None:
        """Its own word goes before every policy."""
        if "types" in site.lacks:
            pytest.skip("this framework's handler hides exceptions")
        for rules in ("plain", "remember", "doubt"):
            key = site.new()
            _, second = site.twice(f"/{rules}/not-applied", key)
            assert (second.status, second.code, site.world.count(key)) == (500, None, 2)

    def test_rule_08_a_handler_can_say_that_nothing_happened(self, site: Site) -> None:
        """Whatever it answers: a retry may run."""
        key = site.new()
        assert [reply.body for reply in site.twice("/plain/undone", key)] == [b"number 1", b"number 2"]

    def test_rule_08_a_handler_can_keep_its_answer_from_the_store(self, site: Site) -> None:
        """It is given once; a repeat hears that it was done."""
        key = site.new()
        first, second = site.twice("/plain/secret", key)
        assert (first.body, second.code) == (b"shown once", "response-not-replayable")
        assert (second.status, site.world.count(key)) == (409, 1)

    def test_rule_08_a_handler_can_say_how_long_it_is_remembered(self, site: Site) -> None:
        """After that it may happen again."""
        key = site.new()
        numbers = {site.post("/plain/briefly", key).body for _ in range(2)}
        while len(numbers) < 2:  # a millisecond has to pass in the store
            numbers.add(site.post("/plain/briefly", key).body)
        assert numbers == {b"number 1", b"number 2"}

    def test_rule_08_a_handler_knows_its_attempt(self, site: Site) -> None:
        """``current()`` works inside: its key, its fence, keys for calls downstream."""
        key = site.new()
        words = site.post("/plain/attempt", key).body.decode().split()
        assert (words[0].rpartition("|")[2], words[1], len(words)) == (key, "1", 3)

    # 9. Order

    def test_rule_09_an_answer_is_recorded_before_its_first_byte_is_sent(self, site: Site) -> None:
        """So what can't be recorded isn't given. The claim stays, recording goes on, and a repeat gets the answer."""
        key = site.new()
        site.world.break_store("complete")
        try:
            first = site.post("/late/pay", key)
        finally:
            site.world.mend_store()
        assert (first.status, first.code) == (503, "store-unavailable")
        second = site.post("/late/pay", key)
        assert (second.status, second.replayed, site.world.count(key)) == (201, True, 1)

    # 10. Clients that go away

    def test_rule_10_a_client_that_leaves_while_the_handler_runs_changes_nothing(self, site: Site) -> None:
        """The handler runs to its end, and its answer waits for the repeat."""
        key = site.new()
        site.world.hold(key)
        running = site.begin_post("/wait/pay", key)
        site.world.wait_for(key)
        running.vanish()
        site.world.let_go(key)
        reply = site.post("/wait/pay", key)
        assert (reply.status, reply.replayed, site.world.count(key)) == (201, True, 1)

    def test_rule_10_a_client_that_leaves_after_its_request_changes_nothing(self, site: Site) -> None:
        """Whether it has been read yet or not: it was asked, or it was not, and never half."""
        keys = [site.new() for _ in range(5)]
        for key in keys:
            site.begin_post("/wait/pay", key).vanish()
        for key in keys:
            assert site.post("/wait/pay", key).status == 201
            assert site.world.count(key) == 1

    def test_rule_10_a_client_that_leaves_in_the_middle_of_the_answer_changes_nothing(
        self, site: Site
    ) -> None:
        """Neither of one that is remembered, nor of one that was too large to be."""
        for what, replayed, code in (
            ("pieces", True, None),
            ("huge", False, "response-not-replayable"),
            ("large", False, "response-not-replayable"),
        ):
            key = site.new()
            running = site.begin_post(f"/wait/{what}", key)
            assert running.peek(20).startswith(b"HTTP/1.1 200")
            running.vanish()
            reply = site.post(f"/wait/{what}", key)
            assert (reply.replayed, reply.code, site.world.count(key)) == (replayed, code, 1)

    def test_rule_10_a_client_that_leaves_in_the_middle_of_its_request_has_asked_nothing(
        self, site: Site
    ) -> None:
        """Its key is as free as before, even for another body."""
        key = site.new()
        headers = [("Idempotency-Key", key)]
        site.begin("POST", f"/plain/pay?n={key}", headers, b"5 E", length=5000).vanish()
        assert site.post("/plain/pay", key, b"6 EUR").status == 201
        assert site.world.count(key) == 1

    # 11. Streams

    def test_rule_11_an_answer_in_pieces_is_remembered_whole(self, site: Site) -> None:
        """20 kB, a kilobyte at a time."""
        key = site.new()
        first, second = site.twice("/plain/pieces", key)
        assert (len(first.body), second.replayed) == (PIECES * PIECE_SIZE, True)
        assert (second.body == first.body, site.world.count(key)) == (True, 1)

    @pytest.mark.parametrize("what", ["huge", "large", "events"])
    def test_rule_11_what_is_too_large_or_endless_is_sent_and_never_run_again(
        self, site: Site, what: str
    ) -> None:
        """The repeat hears that it was done, in a problem of its own kind."""
        key = site.new()
        first, second = site.twice(f"/plain/{what}", key)
        assert (first.status, first.one("idempotency-key")) == (200, f'"{key}"')
        assert len(first.body) == (27 if what == "events" else HUGE)
        assert (second.status, second.code, site.world.count(key)) == (409, "response-not-replayable", 1)

    def test_rule_11_the_cap_is_exact(self, site: Site) -> None:
        """So many bytes are remembered, one more are not."""
        for size, code in ((SMALL_RESPONSE, None), (SMALL_RESPONSE + 1, "response-not-replayable")):
            first, second = site.twice("/small/just", site.new(), b"%d" % size)
            assert (len(first.body), second.code) == (size, code)

    # 12. Large requests

    def test_rule_12_a_large_body_counts_to_its_last_byte(self, site: Site) -> None:
        """1.5 MiB, by way of the disk; the handler gets all of it."""
        key, body = site.new(), b"x" * HUGE
        first, second = site.twice("/plain/pay", key, body)
        assert (first.status, b" %d " % HUGE in first.body, second.replayed) == (201, True, True)
        assert site.post("/plain/pay", key, body[:-1] + b"y").code == "key-reused"

    def test_rule_12_a_body_in_chunks_is_the_same_request(self, site: Site) -> None:
        """However it comes over the wire. A server that can't tell where such a body ends lets nothing pass."""
        key = site.new()
        path, headers = f"/plain/pay?n={key}", [("Idempotency-Key", key)]
        first = site.send("POST", path, headers, chunks=[b"5", b" EU", b"R"])
        if "chunked" in site.lacks:
            assert (first.status, first.code, site.world.count(key)) == (411, "length-required", 0)
            return
        second = site.send("POST", path, headers, b"5 EUR")
        assert (first.status, second.replayed, first.body) == (201, True, second.body)
        assert first.body.split()[1] == b"5"

    def test_rule_12_a_body_over_the_cap_is_refused(self, site: Site) -> None:
        """By one byte; the handler never runs, and the key is as free as before."""
        key = site.new()
        reply = site.post("/small/pay", key, b"x" * (SMALL_REQUEST + 1))
        assert (reply.status, reply.code, site.world.count(key)) == (413, "request-too-large", 0)
        assert reply.one("idempotency-key") == f'"{key}"'
        assert site.post("/small/pay", key, b"x" * SMALL_REQUEST).status == 201

    def test_rule_12_a_length_over_the_cap_is_refused_at_once(self, site: Site) -> None:
        """Nobody has to send such a body, or to read it."""
        if "early refusal" in site.lacks:
            pytest.skip("this framework reads bodies before any middleware sees the request")
        key = site.new()
        path, headers = f"/small/pay?n={key}", [("Idempotency-Key", key)]
        reply = site.send("POST", path, headers, length=SMALL_REQUEST + 1)
        assert (reply.status, reply.code, site.world.count(key)) == (413, "request-too-large", 0)

    def test_rule_12_a_body_in_chunks_is_refused_over_the_cap(self, site: Site) -> None:
        """Not having said its length lets nothing pass."""
        name = site.new()
        chunks = [b"x" * (SMALL_REQUEST // 2), b"x" * (SMALL_REQUEST // 2), b"x"]
        reply = site.send("POST", f"/small/pay?n={name}", [("Idempotency-Key", name)], chunks=chunks)
        refusal = (411, "length-required") if "chunked" in site.lacks else (413, "request-too-large")
        assert ((reply.status, reply.code), site.world.count(name)) == (refusal, 0)

    # 13. The store is away

    def test_rule_13_without_a_store_nothing_runs(self, site: Site) -> None:
        """503, and when to come back."""
        key = site.new()
        site.world.break_store("claim")
        try:
            reply = site.post("/plain/pay", key)
        finally:
            site.world.mend_store()
        assert (reply.status, reply.code, reply.one("retry-after")) == (503, "store-unavailable", "7")
        assert site.world.count(key) == 0
        assert site.post("/plain/pay", key).status == 201

    def test_rule_13_without_a_store_things_run_where_asked(self, site: Site) -> None:
        """Unprotected, since the policy says so."""
        key = site.new()
        site.world.break_store("claim")
        try:
            replies = site.twice("/open/pay", key)
        finally:
            site.world.mend_store()
        assert ([reply.status for reply in replies], site.world.count(key)) == ([201, 201], 2)

    # 14. Problems

    def test_rule_14_a_problem_is_a_document(self, site: Site) -> None:
        """RFC 9457, with a code for programs, and whether trying again may help; nothing internal in it."""
        key = site.new()
        site.post("/plain/pay", key)
        problems = [
            (site.send("POST", "/plain/pay?n=x"), 400, "key-missing", False),
            (site.post("/plain/pay", key, b"else"), 422, "key-reused", False),
        ]
        for reply, status, code, retryable in problems:
            assert reply.one("content-type") == "application/problem+json"
            assert reply.one("cache-control") == "no-store"
            members = {"status": status, "code": code, "retryable": retryable}
            assert reply.problem | members == reply.problem
            assert set(reply.problem) == {"type", "title", "detail", *members}
            assert "sqlite" not in reply.body.decode() and key not in reply.body.decode()


assert LEASE_SECONDS <= 1  # the tests of leases wait for some of them
