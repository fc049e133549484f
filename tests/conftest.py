"""What all tests share: how hard hypothesis tries, and what happens when a server can't be had."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.servers.fixtures"]

SOAK = bool(os.environ.get("EFFECTONCE_SOAK"))
REQUIRE_ALL = bool(os.environ.get("EFFECTONCE_REQUIRE_ALL"))

# A loaded machine isn't a failing test, so examples have no deadline; pytest-timeout ends what hangs.
settings.register_profile("ci", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", settings.get_profile("ci"), max_examples=5_000, stateful_step_count=100)
settings.load_profile("soak" if SOAK else "ci")

# A shell has what runs in its background ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = ("contract", "model", "crash", "examples", "faults", "integration", "http")

unavailable_servers = pytest.StashKey[dict[str, str]]()


@pytest.fixture(scope="session")
def server_unavailable(pytestconfig: pytest.Config) -> Callable[[str, str], NoReturn]:
    """Skip with ``server_unavailable("postgres", "no initdb on the PATH")``; a failure with --require-all."""

    def unavailable(server: str, reason: str) -> NoReturn:
        pytestconfig.stash.setdefault(unavailable_servers, {})[server] = reason
        message = f"server not available: {server}: {reason}"
        if REQUIRE_ALL:
            pytest.fail(message, pytrace=False)
        pytest.skip(message)

    return unavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take long go first, so that at the end nobody waits for the last of them."""
    items.sort(
        key=lambda item: next((rank for rank, name in enumerate(LONG) if name in item.path.parts), len(LONG))
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say loudly, at the end, what was not tested."""
    if missing := config.stash.get(unavailable_servers, {}):
        terminalreporter.section("servers not available: " + ", ".join(sorted(missing)), red=True, bold=True)
        for server, reason in sorted(missing.items()):
            terminalreporter.line(f"{server}: {reason}")
