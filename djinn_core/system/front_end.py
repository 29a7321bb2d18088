"""The notebook or IPython that a program runs in. IPython is looked for among what is imported, and never imported."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

_CELL: Final = r"ipykernel_\d+|<ipython-input-"


def shell() -> Any | None:
    """The running IPython; None outside of it."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get() if get is not None else None


def shows_html() -> bool:
    """True if a front end shows what the program displays: it runs in a kernel, as notebooks do."""
    return getattr(shell(), "kernel", None) is not None


def called(file: str) -> str:
    """A file as a message names it: `Cell In[7]` for the code of a cell, as in IPython's own tracebacks."""
    if not re.search(_CELL, file):
        return file
    names = getattr(getattr(shell(), "compile", None), "format_code_name", None)
    found = names(file) if names is not None else None
    return " ".join(found) if found else file


def preformatted(text: str, caption: str = "") -> str:
    """Text as HTML, as notebooks show output, with a small line above it."""
    from html import escape  # for notebooks

    above = f'<div style="font-size:85%;opacity:.7">{escape(caption)}</div>' if caption else ""
    return f'{above}<pre style="margin:0">{escape(text)}</pre>'
