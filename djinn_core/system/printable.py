"""Sanitize untrusted text for output: remove terminal control sequences, and keep log entries on one line."""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 32 << 10  # character limit of a text
# Control characters except tab and newline, characters that change the writing direction, and surrogates, which no
# message can contain.
_OBEYED: Final = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def printable(text: str) -> str:
    """Return at most `LONGEST` characters of `text`, with control characters escaped, except newlines."""
    text_shown = re.sub(_OBEYED, _escape, text[:LONGEST])
    return text_shown if len(text) <= LONGEST else f"{text_shown} ... ({len(text):,} characters)"


def one_line(text: str) -> str:
    """Return `text` sanitized as by `printable`, with newlines escaped as well."""
    return printable(text).replace("\n", "\\n")


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")


def size_text(count: int) -> str:
    """Format a number of bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
