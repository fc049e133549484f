"""A worker: opens one subject of one contender and measures slices of it when the harness asks.

The harness speaks JSON lines over this process's stdin and stdout:

    {"do": "open", "store": "memory", "op": "new", …}   ->  {"ok": true, "version": "0.2.1"}
    {"do": "slice", "operations": 500}                  ->  {"ok": true, "value": 1.6e-06, "seconds": 0.001, …}
    {"do": "close"}                                     ->  {"ok": true}

Every contender, the raw one included, is measured through this same loop, so all are treated alike.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from time import perf_counter
from typing import Any

from benchmarks.workers.base import Setup, Subject, version_of


def main() -> None:
    """Serve the contender named on the command line until the harness closes it."""
    # A library that prints must not garble the protocol, so it gets stderr and the pipe is kept private.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    contender = sys.argv[1]
    subject: Subject | None = None
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("do")
        answer: dict[str, Any] = {"ok": True}
        try:
            if verb == "open":
                module = importlib.import_module(f"benchmarks.workers.{contender}")
                subject = module.open_subject(Setup(**request))
                answer["version"] = version_of(getattr(module, "DISTRIBUTION", None))
            elif subject is None:
                raise RuntimeError("nothing is open")
            elif verb == "slice":
                # Each slice begins with the same empty young generations; the collector stays on, as it is in
                # a user's process.
                gc.collect()
                start = perf_counter()
                answer.update(subject.slice(request["operations"]))
                answer["seconds"] = perf_counter() - start
            else:
                subject.close()
        except Exception as error:
            traceback.print_exc()
            first_line = str(error).partition("\n")[0]
            answer = {"ok": False, "error": f"{type(error).__name__}: {first_line}"}
        replies.write(json.dumps(answer) + "\n")
        if verb == "close":
            # Some rivals keep threads that outlive their own shutdown; the figures are out, so leave at once.
            os._exit(0)


if __name__ == "__main__":
    main()
