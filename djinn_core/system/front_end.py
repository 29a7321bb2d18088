"""The notebook or IPython in which a program runs. Djinn never imports IPython; it uses IPython if it is imported."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

_CELL: Final = r"ipykernel_\d+|<ipython-input-"


def shell() -> Any | None:
    """Return the running IPython, or None."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get() if get is not None else None


def shows_html() -> bool:
    """Return True if a front end displays HTML: the program runs in a notebook kernel."""
    return getattr(shell(), "kernel", None) is not None


def display_name(file: str) -> str:
    """Return the name of a source file in messages: `Cell In[7]` for a cell, as in IPython's tracebacks."""
    if not re.search(_CELL, file):
        return file
    names = getattr(getattr(shell(), "compile", None), "format_code_name", None)
    name = names(file) if names is not None else None
    return " ".join(name) if name else file


def preformatted(text: str, caption: str = "") -> str:
    """Return text as HTML, as notebooks show output, below `caption` in a small font."""
    from html import escape  # for notebooks

    above = f'<div style="font-size:85%;opacity:.7">{escape(caption)}</div>' if caption else ""
    return f'{above}<pre style="margin:0">{escape(text)}</pre>'
