"""Rivals as web servers; see `web.py`."""

from __future__ import annotations

from benchmarks.workers.web import open_subject

__all__ = ["open_subject"]
