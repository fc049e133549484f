"""Talks to a fork server: a process that has imported everything and opened nothing, and forks one victim an order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class ForkServer:
    """A process of a module's ``main``, which reads one order a line, in JSON, and answers each with a line."""

    def __init__(self, module: str, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *options, "-c", f"from tests.crash.{module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout

    def order(self, **order: Any) -> dict[str, Any]:
        """Have a victim live and die."""
        self._orders.write(json.dumps(order) + "\n")
        answer = self.read()
        assert not answer["failed"], f"{order} failed instead of dying; its traceback is on stderr"
        return answer

    def read(self) -> dict[str, Any]:
        """The next line."""
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def close(self) -> None:
        """There are no more orders."""
        self._orders.close()
        self._process.wait()
        self._answers.close()
