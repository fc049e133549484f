"""The harness's side of a worker process, and the environments the workers run in."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

ROOT = Path(__file__).resolve().parent.parent
OURS = ("raw", "effectonce", "web")
RIVALS = {
    "exactly_once": "exactly-once[redis,postgres]==0.2.1",
    "idemkit": "idemkit[redis,postgres,dynamodb]==1.0.2",
    "dbos": "dbos==3.3.*",
    "powertools": "aws-lambda-powertools[redis,aws-sdk]==3.37.*",
}
# The parser in C that redis-py speaks through where it finds it, as it does in our environment.
COMPANIONS = ("hiredis>=3.0",)

# Filling a store with a million keys is the longest thing a worker is asked for.
ANSWER_TIMEOUT_SECONDS = 1800


class WorkerError(Exception):
    """A contender that could not be opened or measured; the message says why."""


class Worker:
    """A process of the contender's own interpreter that measures when asked."""

    def __init__(self, contender: str, python: Path) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 — closed with the worker
        paths = [str(ROOT), str(ROOT / "src")] if contender not in RIVALS else [str(ROOT)]
        # Byte code is written even where the caller's shell forbids it: an import is timed warm, as it is in use.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": ""}
        self._process = subprocess.Popen(
            # -P: nothing that happens to lie in the working directory is imported.
            [str(python), "-P", "-m", "benchmarks.workers", contender],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=tempfile.gettempdir(),
            env=environment,
            text=True,
        )

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_SECONDS)
        if not ready:
            raise WorkerError(f"no answer to {verb!r} for {ANSWER_TIMEOUT_SECONDS} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if not answer["ok"]:
            raise WorkerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._process.wait(timeout=10)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ended with status {self._process.returncode}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.ask("close")
            self._process.wait(timeout=10)
        except (WorkerError, subprocess.TimeoutExpired):
            # Measured already, or failed already: its own ending is of no interest.
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()


def own_pythons(*, with_drivers: bool) -> dict[str, Path]:
    """For the raw cases, effectonce and the usual code: this interpreter, or the bare one that it was made from.

    What needs no driver is measured without any package installed, as the core of effectonce is meant to be used.
    """
    python = Path(sys.executable if with_drivers else sys._base_executable)
    return dict.fromkeys((*OURS, "usual", "web_peer"), python)


def rival_pythons() -> dict[str, Path]:
    """The interpreter of the rivals' environment, for each of them."""
    return dict.fromkeys(RIVALS, environment("bench", (*RIVALS.values(), *COMPANIONS)))


def environment(kind: str, packages: Sequence[str]) -> Path:
    """The interpreter of an environment with some packages, which is made the first time. Same Python as ours."""
    version = ".".join(map(str, sys.version_info[:3]))
    home = ROOT / ".venvs" / f"{kind}-{version}"
    python, stamp = home / "bin" / "python", home / "stamp"
    wanted = "\n".join(packages)
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"installing {', '.join(packages)} ...", file=sys.stderr)
        _install(home, python, packages)
        stamp.write_text(wanted)
    return python


def _install(home: Path, python: Path, packages: Sequence[str]) -> None:
    # The root commands know what a bare Debian lacks for a virtual environment, so their function makes this one too.
    make = 'source "$1/scripts/environment.sh" && make_venv "$2" "$3"'
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    for command in (
        ["bash", "-c", make, "bash", str(ROOT), sys.executable, str(home)],
        [*pip, *packages],
    ):
        done = subprocess.run(command, check=False, stdout=sys.stderr)
        if done.returncode:
            raise WorkerError(
                "the rivals could not be installed; see above, or leave them out with --no-rivals"
            )
