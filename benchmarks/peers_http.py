"""Who passes what: the same hostile cases on effectonce and on other HTTP boundaries, over real servers and sockets.

    benchmarks/run peers                            # all contenders, a few minutes
    benchmarks/run peers --only effectonce,idemkit  # some of them
    benchmarks/run peers --json peers.json

The cases are in ``peers/cases.py``; how each contender is set up is in ``peers/apps.py`` and ``peers/django_app.py``.
The rivals are installed into an environment of their own below ``.venvs/`` the first time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from subprocess import run
from urllib.parse import urlsplit

from tests.http.world import World
from tests.servers import start
from tests.servers.base import StartError

from benchmarks.contenders import environment
from benchmarks.peers.cases import CASES, Failed
from benchmarks.peers.stage import EFFECTONCE, RIVALS, Contender, Servers

PACKAGES = (
    "idemkit[redis,asgi]==1.0.2",
    "asgi-idempotency-header==0.2.0",
    "fastapi-idempotency[tortoise]==0.1.1",
    "fastapi-idempotency-key[sqlite]==0.1.1",
    "django-idempotency-key==1.3.0",
    # What they run on.
    "fastapi>=0.115",
    "django>=5.2,<6",
    "django-redis>=5.4",
    "redis>=5",
    "hiredis>=3.0",
    "uvicorn[standard]>=0.30",
    "gunicorn>=23",
    "granian>=2.5",
)
PASSED, LACKED = "pass", "–"

Column = dict[str, tuple[str, str]]
"""For each case a verdict and a remark."""


def judge(contender: Contender, python: Path, store: str, folder: Path, wanted: list[str]) -> Column:
    """Run cases on one contender."""
    world = World(folder)
    servers = Servers(contender, world, store, python)
    column: Column = {}
    try:
        for row in wanted:
            print(f"{contender.name}: {row} ...", file=sys.stderr, flush=True)
            if row in contender.lacks:
                column[row] = LACKED, contender.lacks[row]
                continue
            try:
                servers.run(CASES[row])
                column[row] = PASSED, ""
            except (Failed, OSError, HTTPException, AssertionError, StartError) as error:
                column[row] = "FAIL", str(error).partition("\n")[0] or type(error).__name__
    finally:
        servers.close()
        world.close()
    return column


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, print the table; 1 if effectonce fails one."""
    options = _parser().parse_args(arguments)
    contenders = [each for each in (EFFECTONCE, *RIVALS) if not options.only or each.name in options.only]
    rows = [row for row in CASES if not options.cases or row in options.cases]
    python = environment("peers", PACKAGES) if set(contenders) - {EFFECTONCE} else Path(sys.executable)
    columns: dict[str, Column] = {}
    with start("valkey", appendonly="no") as server, tempfile.TemporaryDirectory() as folder:
        for number, contender in enumerate(contenders, 1):
            place = Path(folder) / contender.name
            place.mkdir()
            redis = urlsplit(server.url)._replace(scheme="redis", path=f"/{number}").geturl()
            store = redis if contender.store == "redis" else str(place / "peers.db")
            its_python = Path(sys.executable) if contender is EFFECTONCE else python
            columns[contender.name] = judge(contender, its_python, store, place, rows)
    print(_table(rows, columns))
    if options.json:
        found = {"versions": {c.name: _version(c, python) for c in contenders}, "columns": columns}
        options.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(any(verdict == "FAIL" for verdict, _ in columns.get(EFFECTONCE.name, {}).values()))


def _table(rows: list[str], columns: dict[str, Column]) -> str:
    width = max(map(len, rows))
    lines = [" " * width + "  " + "  ".join(columns)]
    for row in rows:
        cells = [column[row][0].ljust(len(name)) for name, column in columns.items()]
        lines.append(f"{row.ljust(width)}  {'  '.join(cells)}".rstrip())
    held = ["/".join(_held(column)).ljust(len(name)) for name, column in columns.items()]
    lines += ["passed".ljust(width) + "  " + "  ".join(held).rstrip(), ""]
    for name, column in columns.items():
        remarks = [f"  {row}: {remark}" for row, (_, remark) in column.items() if remark]
        lines += [name, *remarks] if remarks else []
    return "\n".join(lines)


def _held(column: Column) -> tuple[str, str]:
    verdicts = [verdict for verdict, _ in column.values() if verdict != LACKED]
    return str(verdicts.count(PASSED)), str(len(verdicts))


def _version(contender: Contender, python: Path) -> str:
    if contender is EFFECTONCE:
        return version("effectonce")
    ask = f"from importlib.metadata import version; print(version({contender.distribution!r}))"
    return run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()


def _parser() -> argparse.ArgumentParser:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser("benchmarks/run peers", description="Hostile cases, side by side.")
    parser.add_argument("--only", type=names, metavar="A,B", help="contenders, such as effectonce,idemkit")
    parser.add_argument("--cases", type=lambda text: text.split(";"), metavar="A;B", help="rows of the table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found")
    return parser


if __name__ == "__main__":
    sys.exit(main())
