"""What every store must do, as a specification that anyone can run on a store of their own.

    from effectonce.testing.contract import StoreContract

    class TestMyStore(StoreContract):
        def make_store(self, clock):
            return MyStore(...)              # fresh and empty; pass clock on where the store's clock can be injected

        def reopen(self, clock):             # where the features say durable or shared
            return MyStore(...)              # another handle on the same records

Every test runs in each colour that ``store.features`` declares; what else a store can't do is declared there too.

A store whose clock is a server's ignores ``clock`` and sets ``lease`` and ``keep`` to fractions of a second: the suite
then waits for the server's time to pass, and leaves out what needs time to stand still. A store that may notice an
expiry late says by how much (``purge_delay``, here or in its features); one that has to watch a lease before it may
take over does its watching in ``outlive``. ``stall`` makes a store wait, to see that nobody on an event loop waits
along.
"""

from __future__ import annotations

from ...errors import MissingExtra

try:
    import pytest
except ImportError as error:
    raise MissingExtra(
        "effectonce.testing.contract needs pytest: pip install 'effectonce[testing]'."
    ) from error

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "_batches",
            "_claims",
            "_clocks",
            "_content",
            "_crowds",
            "_differential",
            "_doubt",
            "_endings",
            "_fences",
            "_lifetime",
            "_operators",
            "_progress",
            "_retention",
            "_subject",
            "_suite",
        )
    )
)

from ._batches import BatchForms  # noqa: E402 — assertions are rewritten only in what is imported later
from ._claims import ClaimRules  # noqa: E402
from ._clocks import StoreClock  # noqa: E402
from ._content import Content  # noqa: E402
from ._crowds import Crowds  # noqa: E402
from ._differential import Differential  # noqa: E402
from ._doubt import Doubt  # noqa: E402
from ._endings import Endings  # noqa: E402
from ._fences import Fences  # noqa: E402
from ._lifetime import Lifetime  # noqa: E402
from ._operators import Operators  # noqa: E402
from ._progress import Progress  # noqa: E402
from ._retention import Retention  # noqa: E402

__all__ = ["StoreContract"]


class StoreContract(
    ClaimRules,
    Endings,
    Progress,
    Fences,
    Doubt,
    Retention,
    Content,
    BatchForms,
    Operators,
    StoreClock,
    Crowds,
    Lifetime,
    Differential,
):
    """The whole specification. Subclass it, say how to make the store, and let pytest collect it."""
