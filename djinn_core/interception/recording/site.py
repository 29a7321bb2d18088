"""Which line of the user's code issued an op."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

_HERE = Path(__file__).resolve().parents[1]
_OWN = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).resolve().parent, _HERE, _HERE.parent / "runtime"))
# By id, because hashing a code object walks its constants. The code objects are kept so that ids stay theirs.
CODES_LIMIT = 8192  # code objects that are remembered: a notebook makes new ones with every cell
_inside: dict[int, tuple[CodeType, bool]] = {}


def user_site() -> tuple[CodeType, int]:
    """The innermost frame outside torch and Djinn: its code and the offset of its current instruction."""
    frame: FrameType = sys._getframe(1)  # noqa: SLF001 - the public ways build a list of all frames
    while True:
        code = frame.f_code
        known = _inside.get(id(code))
        if known is None:
            if len(_inside) >= CODES_LIMIT:
                _inside.clear()
            known = _inside[id(code)] = (code, code.co_filename.startswith(_OWN))
        if not known[1] or frame.f_back is None:
            return code, frame.f_lasti
        frame = frame.f_back
