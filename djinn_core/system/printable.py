"""Sanitize untrusted text for output: a terminal obeys what is not text, and a line of a log is one line."""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 32 << 10  # characters of one text
# Control characters but for tab and newline, what turns the direction of writing around, and halves of characters, which no
# message can carry.
_OBEYED: Final = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def printable(text: str) -> str:
    """`text` with everything that a terminal would obey written out, newlines excepted, and not longer than `LONGEST`."""
    shown = re.sub(_OBEYED, _written_out, text[:LONGEST])
    return shown if len(text) <= LONGEST else f"{shown} ... ({len(text):,} characters)"


def one_line(text: str) -> str:
    """The same, with newlines written out as well."""
    return printable(text).replace("\n", "\\n")


def is_text(text: str) -> bool:
    """True if a message can carry `text`: it has no half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _written_out(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode("ascii")


def size_text(count: int) -> str:
    """A number of bytes, as people read it."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def unit_of(seconds: float) -> tuple[float, str]:
    """The unit in which durations up to `seconds` are shown together: how many of it a second has, and its name."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")


def duration(seconds: float) -> str:
    """Seconds, as people read them."""
    times, unit = unit_of(seconds)
    return f"{seconds * times:.3f} {unit}"
