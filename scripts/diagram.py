"""Draws the state diagram of ARCHITECTURE.md from the protocol's transition table.

`python scripts/diagram.py` prints it; `python scripts/diagram.py --write` puts it into ARCHITECTURE.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from effectonce._protocol import MOVES  # noqa: E402 — found through the path above

PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- diagram: scripts/diagram.py -->\n", "<!-- end of diagram -->"


def diagram() -> str:
    """The table as a Mermaid state diagram, one arrow per pair of states."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, moves in MOVES.items():
        for move, target in moves.items():
            arrows.setdefault((state.name, target.name), []).append(move)
    lines = [f"    {before} --> {after}: {', '.join(moves)}" for (before, after), moves in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> ABSENT", *lines, "```", ""])


def page_with(drawn: str) -> str:
    """ARCHITECTURE.md with the diagram in its place."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + drawn + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page_with(diagram()), encoding="utf-8")
    else:
        print(diagram())
