"""Escaping of remote text for a terminal, against control characters."""

from __future__ import annotations

import codecs
import re
from typing import Final

# Kept in logs: line ends, tabs, carriage returns and backspaces of progress bars, and colours.
_COLOUR: Final = r"\x1b\[[0-9;]*m"
_ALLOWED: Final = re.compile(f"([\n\r\t\b]|{_COLOUR})")
_PARTIAL_SEQUENCE: Final = re.compile(r"\x1b(?:\[[0-9;]{0,32})?\Z")


def one_line(text: str) -> str:
    """Return `text` with escapes for line ends and all other unprintable characters."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


class LogEscaper:
    """Escapes a log that arrives in chunks. Colours remain; cursor movements and other control sequences are escaped."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial_sequence = ""  # an escape sequence that may continue in the next chunk

    def add(self, piece: bytes, *, last: bool = False) -> str:
        """Return the escaped text of the next chunk. An incomplete character or sequence is held back unless `last` is True."""
        text = self._partial_sequence + self._decoder.decode(piece, last)
        match = None if last else _PARTIAL_SEQUENCE.search(text)
        self._partial_sequence = match.group() if match is not None else ""
        text = text[: len(text) - len(self._partial_sequence)]
        parts = _ALLOWED.split(text)
        parts[::2] = [part if part.isprintable() else one_line(part) for part in parts[::2]]
        return "".join(parts)
