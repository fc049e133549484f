"""Stores with a bug each, to show that the examiner notices: a check that can't say no is worse than none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from effectonce._protocol import decide_claim
from effectonce._records import Claim, Completion, Ending, State, Verdict
from effectonce.stores.sqlite import SQLiteStore


class AnswersBeforeItRecords(SQLiteStore):
    """Writes a completion along with the next command."""

    owed: list[Completion]

    async def submit(self, commands: Sequence[Any]) -> list[Any]:
        """Pay yesterday's debts, then make today's."""
        owed, self.owed = getattr(self, "owed", []), []
        if owed:
            self.execute(owed)
        if type(commands[0]) is Completion and commands[0].state is State.COMPLETED:
            self.owed = list(commands)
            return [Ending.DONE] * len(commands)
        return self.execute(commands)


class StartsBeforeItClaims(SQLiteStore):
    """Grants a claim by reading, and writes it when it has to be completed."""

    owed: list[Claim]

    async def submit(self, commands: Sequence[Any]) -> list[Any]:
        """Decide without writing what a later command will write."""
        owed, self.owed = getattr(self, "owed", []), []
        command = commands[0]
        if type(command) is Claim and await self.get(command.key) is None:
            decision = decide_claim(None, command, await self.now(), 0)
            assert decision.verdict is Verdict.CLAIMED
            self.owed = [command]
            return [decision]
        if owed and type(command) is Completion:
            self.execute(owed)
        return self.execute(commands)


class ForgetsFences(SQLiteStore):
    """Takes a released claim's fence back, and gives it out again."""

    async def submit(self, commands: Sequence[Any]) -> list[Any]:
        """Release as if the claim had never been."""
        answers = self.execute(commands)
        if type(commands[0]) is Completion and commands[0].state is State.ABSENT:
            self._writing().execute(
                "UPDATE effectonce_records SET fence = fence - 1 WHERE key = ?", (commands[0].key,)
            )
        return answers


FAULTS: dict[str, type[SQLiteStore]] = {
    "answers before it records": AnswersBeforeItRecords,
    "starts before it claims": StartsBeforeItClaims,
    "forgets fences": ForgetsFences,
}
