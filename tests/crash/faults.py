"""Stores with a bug each, to show that the examiner notices: a check that can't say no is worse than none."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from effectonce._protocol import decide_claim
from effectonce._records import Claim, Completion, Decision, Ending, State
from effectonce.stores.sqlite import SQLiteStore


class AnswersBeforeItRecords(SQLiteStore):
    """Writes a completion along with the next command."""

    owed: Completion | None = None

    async def claim(self, claim: Claim) -> Decision:
        """Pay the old debt first."""
        if self.owed is not None:
            owed, self.owed = self.owed, None
            await super().complete(owed)
        return await super().claim(claim)

    async def complete(self, completion: Completion) -> Ending:
        """Promise to write it."""
        self.owed = completion
        return Ending.DONE


class StartsBeforeItClaims(SQLiteStore):
    """Grants a new claim by reading, and writes it when it has to be completed."""

    owed: Claim | None = None

    async def claim(self, claim: Claim) -> Decision:
        """Decide, and put off writing the decision."""
        if await self.get(claim.key) is not None:
            return await super().claim(claim)
        self.owed = claim
        return decide_claim(None, claim, await self.now(), 0)

    async def complete(self, completion: Completion) -> Ending:
        """Write both now."""
        if self.owed is not None:
            owed, self.owed = self.owed, None
            await super().claim(owed)
        return await super().complete(completion)


class ForgetsFences(SQLiteStore):
    """Takes a released claim's fence back, and gives it out again."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.place = path
        super().__init__(path, **options)

    async def complete(self, completion: Completion) -> Ending:
        """Release as if the claim had never been."""
        ending = await super().complete(completion)
        if completion.state is State.ABSENT:
            with closing(sqlite3.connect(self.place, isolation_level=None)) as connection:
                connection.execute(
                    "UPDATE effectonce_records SET fence = fence - 1 WHERE key = ?", (completion.key,)
                )
        return ending


FAULTS: dict[str, type[SQLiteStore]] = {
    "answers before it records": AnswersBeforeItRecords,
    "starts before it claims": StartsBeforeItClaims,
    "forgets fences": ForgetsFences,
}
