"""The explorer finds bugs: each one that is put into the real code on purpose breaks the invariant it should."""

from __future__ import annotations

import pytest
from tests.model import bugs
from tests.model.scenarios import (
    CACHE,
    EITHER,
    KEEP_OVER,
    LEASE_OVER,
    ONCE_AGAIN,
    OTHER,
    REST,
    THIRD,
    ask,
    by_steps,
    declines,
    fails,
    once,
    scenario,
    steps,
    stumbles,
)

from effectonce.testing.simulation import INVARIANTS, Scenario, find, replay
from effectonce.testing.simulation._search import Counterexample

PAUSE = scenario("a pause", ask("ada"), ask("bob"), steps=(LEASE_OVER,))
LOSS = scenario("a loss", ask("ada"), ask("bob"), losses=1)
CANCEL = scenario("a cancellation", ask("ada"), ask("bob"), cancels=1)
SHORT_PAUSE = scenario("a short pause", ask("ada"), ask("bob"), steps=(THIRD,))
FAILURE = scenario("a failure", ask("ada", fails), ask("bob"), steps=(LEASE_OVER,))
PAYLOADS = scenario(
    "two payloads", ask("ada"), ask("bob", payload=OTHER), retries=EITHER, steps=(LEASE_OVER,)
)
AT_MOST_ONCE = scenario("at most once", once("ada"), once("bob"), retries=ONCE_AGAIN, steps=(LEASE_OVER,))
LATE = scenario("a late message", ask("ada", timestamp=0.0), ask("bob"))
EXPIRY = scenario("an expiry", ask("ada"), ask("bob"), steps=(KEEP_OVER,), purges=1)
KEEPER = scenario("a keeper", ask("ada"), ask("bob"), ticks=1, steps=(LEASE_OVER,))
LATE_GRANT = scenario("a late grant", ask("ada"), ask("bob"), steps=(THIRD, REST))
LATE_RENEWAL = scenario(
    "a late renewal", ask("ada"), ask("bob"), ticks=1, steps=(THIRD._replace(times=2), REST)
)
ERROR = scenario("an error", ask("ada", declines), ask("bob"), steps=(LEASE_OVER,))
CACHED = scenario(
    "a cache", (ask("ada", policy=CACHE), ask("bob", policy=CACHE)), ask("cyd"), steps=(KEEP_OVER,)
)

STEPS = by_steps("steps", ask("ada", steps), ask("bob", steps), steps=(LEASE_OVER,))
STEPS_LOST = by_steps("steps and a loss", ask("ada", steps), losses=1)
STUMBLE = by_steps("a stumble", ask("ada", stumbles), ask("bob", steps))
STEPS_ONCE = by_steps(
    "steps at most once",
    once("ada", steps),
    once("bob", steps),
    retries=(once("eve", steps),),
    steps=(LEASE_OVER,),
)

SEEDED: list[tuple[bugs.Bug, Scenario, str]] = [
    (bugs.unfenced_complete, PAUSE, "holder_only"),
    (bugs.unfenced_complete, PAUSE, "finished_stays"),
    (bugs.unfenced_complete, PAUSE, "recorded_effect_stands"),
    (bugs.unfenced_release, FAILURE, "holder_only"),
    (bugs.unfenced_renew, KEEPER, "holder_only"),
    (bugs.unrepeatable_claim, LOSS, "repeated_claim_granted"),
    (bugs.unrepeatable_ending, LOSS, "repeated_ending_accepted"),
    (bugs.unchecked_fingerprint, PAYLOADS, "other_payload_refused"),
    (bugs.late_is_new, LATE, "late_is_not_started"),
    (bugs.takeover_at_most_once, AT_MOST_ONCE, "starts_once"),
    (bugs.no_takeover, PAUSE, "nothing_stuck"),
    (bugs.expiring_claims, SHORT_PAUSE, "live_lease_respected"),
    (bugs.short_memory, PAUSE, "finished_stays"),
    (bugs.fence_reset_by_release, FAILURE, "fences_grow"),
    (bugs.fence_reset_by_purge, EXPIRY, "fences_grow"),
    (bugs.client_clock, PAUSE, "live_lease_respected"),
    (bugs.answer_before_record, PAUSE, "answer_is_the_record"),
    (bugs.own_result_when_fenced_out, PAUSE, "answer_is_the_record"),
    (bugs.own_error_when_fenced_out, ERROR, "answer_is_the_record"),
    (bugs.release_on_cancel, CANCEL, "handler_has_the_word"),
    (bugs.no_withdrawal, CANCEL, "cancelled_leaves_nothing"),
    (bugs.failure_keeps_the_claim, FAILURE, "nothing_orphaned"),
    (bugs.swallowed_cancellation, CANCEL, "cancellation_is_heard"),
    (bugs.lease_counted_from_the_reply, LATE_GRANT, "loser_knows_in_time"),
    (bugs.cache_counted_from_the_reply, CACHED, "answer_is_the_record"),
    (bugs.unforeseen_loss, PAUSE, "errors_are_known"),
    (bugs.key_per_attempt, PAUSE, "one_effect"),
    (bugs.unfenced_progress, STEPS, "holder_only"),
    (bugs.progress_lost_by_takeover, STEPS, "journal_stays"),
    (bugs.progress_lost_by_release, STUMBLE, "journal_stays"),
    (bugs.progress_lost_by_doubt, STEPS_ONCE, "journal_stays"),
    (bugs.late_progress_counts, STEPS_LOST, "journal_stays"),
    (bugs.step_before_record, STEPS, "step_recorded_first"),
    (bugs.denied_step_counts, STEPS, "step_recorded_first"),
    (bugs.steps_run_again, STUMBLE, "finished_step_rests"),
    (bugs.one_key_for_all_steps_per_attempt, STEPS, "one_effect"),
    (bugs.silent_keeper, KEEPER, "loser_is_told"),
    (bugs.renewal_counted_from_the_reply, LATE_RENEWAL, "loser_knows_in_time"),
]


@pytest.mark.parametrize(
    ("bug", "case", "invariant"), SEEDED, ids=[f"{bug.__name__}-{invariant}" for bug, _, invariant in SEEDED]
)
def test_the_explorer_finds_a_seeded_bug(bug: bugs.Bug, case: Scenario, invariant: str) -> None:
    """With the bug in force, the invariant that is meant to forbid it fails by itself, on a schedule that repeats."""
    with bug():
        found = find(case, checked=[invariant])
        assert found is not None, f"{bug.__name__} was not caught by {invariant}"
        print(found)
        with pytest.raises(Counterexample):
            replay(case, found.choices)


CONTROLS = [
    pytest.param(case, id=name, marks=[pytest.mark.soak] if case is LATE_RENEWAL else [])
    for name, case in {case.name: case for _, case, _ in SEEDED}.items()
]


@pytest.mark.parametrize("case", CONTROLS)
def test_without_the_bug_the_same_scenario_holds(case: Scenario) -> None:
    """What was found is the bug and not the scenario."""
    assert find(case) is None


def test_every_invariant_can_fail() -> None:
    """A check that no bug can break would prove nothing: for each there is a bug that breaks it."""
    assert {invariant for _, _, invariant in SEEDED} == set(INVARIANTS)
