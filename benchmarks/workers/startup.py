"""What importing a contender costs a fresh interpreter of its own environment."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.workers.base import Figure


class ImportTime:
    """Starts the interpreter again and lets it time the import alone, without its own start."""

    def __init__(self, module: str) -> None:
        self._script = (
            f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
        )

    def slice(self, operations: int) -> Figure:
        """The quickest of that many imports: everything slower is the machine, not the module."""
        seconds = min(self._once() for _ in range(operations))
        return {"value": seconds, "operations": operations}

    def _once(self) -> float:
        command = [sys.executable, "-P", "-c", self._script]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(done.stdout)

    def close(self) -> None:
        """Nothing is held."""
