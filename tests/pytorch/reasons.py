"""Reasons why a test passes on the CPU and not on the remote device, by what its traceback says."""

from __future__ import annotations

import re

# The first that is found counts.
_REASONS: tuple[tuple[str, str], ...] = ()
UNKNOWN = "not done"
_COMPILED = [(re.compile(pattern, re.MULTILINE), reason) for pattern, reason in _REASONS]


def reason_of(text: str, outcome: str) -> str:
    """The reason of a result, from its traceback."""
    if outcome != "failed":
        return outcome
    return next((reason for pattern, reason in _COMPILED if pattern.search(text)), UNKNOWN)
