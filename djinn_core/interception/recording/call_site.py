"""Call sites: the line of the user's code that issued an op."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import torch

from djinn_core.ir.module_path import ModuleCall
from djinn_core.ir.program import Site

_HERE = Path(__file__).resolve().parents[1]
_FOLDERS = (Path(torch.__file__).resolve().parent, _HERE, _HERE.parent / "runtime")
_OWN = (*(f"{folder}{os.sep}" for folder in _FOLDERS), str(_HERE.parent / "tracebacks.py"))
# By id, because hashing a code object walks its constants. The code objects are kept so that no other object gets their ids.
CODES_LIMIT = 8192  # code objects that are remembered: a notebook makes new ones with every cell
CALLS_LIMIT = 256  # calls of modules whose lines are remembered, in each thread
_known: dict[int, tuple[CodeType, dict[int, Site] | Boundary | None]] = {}


class Boundary(enum.Enum):
    """A function of Djinn's or PyTorch's: while it runs, the frames below its own do not change."""

    MODULE = "the call of a module"
    BACKWARD = "a run of the autograd engine"


_frame = sys._getframe  # noqa: SLF001 - the public ways build a list of all frames
_MODULE, _BACKWARD = Boundary  # looked at once for each frame, and members of an enumeration are slow to look up


class CallSites:
    """Lines that issued the calls of modules, and the backward pass, in which a thread is. With them the stack is not walked for each op.

    Attributes:
        backward: the line that began the innermost backward pass; None until an op of it was recorded.
    """

    __slots__ = ("_calls", "backward")

    def __init__(self) -> None:
        self.backward: Site | None = None
        # By the identity of the call; the call is kept so that no other object gets that identity.
        self._calls: dict[int, tuple[ModuleCall, Site]] = {}

    def find(self, call: ModuleCall) -> Site | None:
        """The line that issued a call of a module, where that is known."""
        found = self._calls.get(id(call))
        return found[1] if found is not None else None

    def keep(self, calls: list[ModuleCall], site: Site) -> None:
        """Remember the line of calls of modules."""
        if len(self._calls) > CALLS_LIMIT:
            self._calls.clear()
        for call in calls:
            self._calls[id(call)] = call, site


def mark_boundary(function: Callable[..., object], boundary: Boundary) -> None:
    """Take `function` for a boundary: while it runs, the frames below its own do not change."""
    code = function.__code__
    _known[id(code)] = code, boundary


def user_site(call_sites: CallSites, module: ModuleCall | None, above: int = 0) -> Site:
    """The innermost frame outside torch and Djinn: its code and the offset of its current instruction.

    The same place is the same object, so that it costs memory once however often an op is recorded there. The `above`
    frames above the caller are certainly Djinn's, and are not looked at: each look makes an object of a frame. `module` is the call
    of a module that the thread is inside.
    """
    frame: FrameType = _frame(2 + above)
    crossed: list[ModuleCall] | None = None
    differentiates = False
    while True:
        code = frame.f_code
        known = _known.get(id(code))
        sites = known[1] if known is not None else _learn(code)
        site = None
        if type(sites) is dict:
            offset = frame.f_lasti
            site = sites.get(offset)
            if site is None:
                site = sites[offset] = (code, offset)
        elif sites is _MODULE:
            # The calls of a thread lie on its stack as their links lie in their chain.
            if module is not None and len(module) == 2:
                site = call_sites.find(module)
                if site is None:
                    crossed = [module] if crossed is None else [*crossed, module]
                module = module[1]
        elif sites is _BACKWARD:
            site, module, differentiates = call_sites.backward, None, True
        if site is None:
            outer = frame.f_back
            if outer is not None:
                frame = outer
                continue
            site = code, frame.f_lasti
        if crossed is not None:
            call_sites.keep(crossed, site)
        if differentiates:
            call_sites.backward = site
        return site


def _learn(code: CodeType) -> dict[int, Site] | Boundary | None:
    """Classify frames of this code: PyTorch's or Djinn's, a boundary among these, or the user's, with the sites in it."""
    if len(_known) >= CODES_LIMIT:
        for other, (_, kind) in list(_known.items()):
            if not isinstance(kind, Boundary):  # those were marked once, and are known by nothing else
                _known.pop(other, None)
    found: dict[int, Site] | Boundary | None = None if code.co_filename.startswith(_OWN) else {}
    _known[id(code)] = code, found
    return found
