"""Durations as people write them: seconds, a timedelta, or "90s", "24h", "7d"."""

from __future__ import annotations

import re
from datetime import timedelta

from .errors import UsageError

Duration = float | int | str | timedelta

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
MAX_SECONDS = 10 * 366 * 86400.0


def seconds(duration: Duration, name: str = "duration", *, may_be_zero: bool = False) -> float:
    """Read a duration: seconds, a timedelta, or text such as "90s", "24h", "7d", "1h30m"."""
    if isinstance(duration, timedelta):
        value = duration.total_seconds()
    elif isinstance(duration, str):
        value = _parse(duration, name)
    elif type(duration) in (int, float):
        value = min(duration, MAX_SECONDS + 1) * 1.0
    else:
        raise UsageError(
            f'{name}={duration!r} is not a duration. Give seconds, a timedelta, or text like "24h".'
        )
    if not 0 <= value <= MAX_SECONDS or not (value or may_be_zero):
        least = "0 or more" if may_be_zero else "more than nothing"
        raise UsageError(f"{name}={duration!r} must be {least} and at most ten years.")
    return value


def _parse(text: str, name: str) -> float:
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|[smhdw])", text)
    if not parts or not re.fullmatch(r"(\s*\d+(?:\.\d+)?\s*(ms|[smhdw])\s*)+", text):
        raise UsageError(f'{name}={text!r} is not a duration. Write a number and a unit: "90s", "24h", "7d".')
    return sum(float(number) * UNITS[unit] for number, unit in parts)
