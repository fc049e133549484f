"""The rules are a suite in a module of their own, whose assertions shall tell as much as a test module's."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.http.rules")
