"""Which line of the user's code issued an op."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

from djinn_core.ir.program import Site

_HERE = Path(__file__).resolve().parents[1]
_FOLDERS = (Path(torch.__file__).resolve().parent, _HERE, _HERE.parent / "runtime")
_OWN = (*(f"{folder}{os.sep}" for folder in _FOLDERS), str(_HERE.parent / "tracebacks.py"))
# By id, because hashing a code object walks its constants. The code objects are kept so that ids stay theirs.
CODES_LIMIT = 8192  # code objects that are remembered: a notebook makes new ones with every cell
_known: dict[int, tuple[CodeType, dict[int, Site] | None]] = {}


def user_site(above: int = 0) -> Site:
    """The innermost frame outside torch and Djinn: its code and the offset of its current instruction.

    The same place is the same object, so that it costs memory once however often an op is recorded there. So many frames
    above the caller are Djinn's for sure, and are not looked at: each look makes an object of a frame.
    """
    frame: FrameType = sys._getframe(2 + above)  # noqa: SLF001 - the public ways build a list of all frames
    while True:
        code = frame.f_code
        known = _known.get(id(code))
        if known is None:
            if len(_known) >= CODES_LIMIT:
                _known.clear()
            known = _known[id(code)] = (code, None if code.co_filename.startswith(_OWN) else {})
        sites = known[1]
        if sites is not None:
            offset = frame.f_lasti
            site = sites.get(offset)
            if site is None:
                site = sites[offset] = (code, offset)
            return site
        if frame.f_back is None:
            return code, frame.f_lasti
        frame = frame.f_back
