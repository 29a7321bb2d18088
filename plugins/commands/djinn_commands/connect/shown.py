"""Text of a remote machine, for a terminal, which would obey some of its characters."""

from __future__ import annotations

import codecs
import re
from typing import Final

# Left alone in logs: ends of lines, tabs, steps back of progress bars, and colours.
_COLOUR: Final = r"\x1b\[[0-9;]*m"
_KEPT: Final = re.compile(f"([\n\r\t\b]|{_COLOUR})")
_BEGUN: Final = re.compile(r"\x1b(?:\[[0-9;]{0,32})?\Z")


def one_line(text: str) -> str:
    """`text` with all that is no visible character written out."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


class LogText:
    """Makes a log that comes in pieces fit for a terminal: what would move or ask it is written out, colours are not."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""  # an escape sequence that may go on in the next piece

    def add(self, piece: bytes, *, last: bool = False) -> str:
        """The text of the next piece."""
        text = self._begun + self._decoder.decode(piece, last)
        found = None if last else _BEGUN.search(text)
        self._begun = found.group() if found is not None else ""
        text = text[: len(text) - len(self._begun)]
        parts = _KEPT.split(text)
        parts[::2] = [part if part.isprintable() else one_line(part) for part in parts[::2]]
        return "".join(parts)
