"""Escaping of text for XML and HTML: module names come from the user."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape

_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def allowed(words: str) -> str:
    """Remove the characters that XML cannot hold."""
    return _FORBIDDEN.sub("\ufffd", words)


def text(words: str) -> str:
    """Escape text for an element or an attribute."""
    return escape(allowed(words), {'"': "&quot;"})
