"""Tests that take long have a short form in the suite; `make test LONG_FORMS=1` runs the long ones, which set LONG_FORMS."""

from __future__ import annotations

import os
from typing import TypeVar

Value = TypeVar("Value")

LONG = bool(os.environ.get("LONG_FORMS"))


def long_or(short: Value, long: Value) -> Value:
    """Return `long` if the suite runs in its long form, otherwise `short`."""
    return long if LONG else short
