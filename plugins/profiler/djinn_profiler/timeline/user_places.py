"""Lines of the user's program that wait: the reason of each wait, and how to avoid it."""

from __future__ import annotations

import enum
import functools
import linecache
import re
import sysconfig
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Final

import torch

import djinn_client
import djinn_core
from djinn_client.interception.tap import Cause
from djinn_core.ir.program import line_of_site

_DJINN_FOLDERS: Final = tuple(module.__path__[0] for module in (djinn_client, djinn_core))
_TORCH: Final = str(Path(torch.__file__).parent)
_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_DECIDES: Final = re.compile(r"\b(if|elif|while|assert|and|or|not|bool)\b")
CONDITION: Final = "a condition"  # `Cause.NUMBER` on a line that branches on the number
ADVICE: Final = MappingProxyType({
    Cause.NUMBER: "keep it a tensor, add it up on the device, and call .item() once after the loop or every hundred steps",
    CONDITION: "use torch.where or a mask in place of the branch, or check the condition every few steps",
    Cause.COPY: "copy with .to('cpu', non_blocking=True) and use it later, or copy once after the loop: torch.stack(list).cpu()",
    Cause.PRINT: "print every hundred steps, or after the loop",
    Cause.SHAPE: "use torch.where, masked_fill or topk: the result of a mask or of nonzero() has a shape that depends on the values",
    Cause.SYNCHRONIZE: "remove it: results wait for their ops by themselves. It is only needed to measure time",
    Cause.CHECK: "use the variant that returns an error code, such as torch.linalg.inv_ex or cholesky_ex, and look at it once",
    Cause.FULL: "the device is behind: fetch fewer or smaller values at a time",
    Cause.UPLOAD: "move a module as a whole with .to(), which offers all of its tensors at once; keep reused tensors on the device",
    Cause.FIGURES: "ask for memory every hundred steps, or after the loop",
    Cause.FILES: "open, save and list weights outside of the loop",
    Cause.OTHER: "fetch it once, after the loop",
})  # fmt: skip
# A place in the user's program: its code object (None: no Python code of the user), its instruction offset, and the reason of the wait.
UserPlace = tuple[CodeType | None, int, str]


class UserPlaces:
    """Find the user's code on stacks. Owners of code objects are cached, so a frame costs a tenth of a microsecond."""

    def __init__(self) -> None:
        self._classified: dict[
            int, tuple[CodeType, _Owner, bool]
        ] = {}  # keyed by identity, because hashing a code object walks its constants

    def find(self, frame: FrameType | None, cause: str) -> UserPlace:
        """Return the innermost position in the user's code, or else in an installed package other than PyTorch and Djinn.

        If that code prints a tensor, the returned cause is `Cause.PRINT`. Without such code, the position is empty.
        """
        library, places = None, self._classified
        while frame is not None:
            code = frame.f_code
            place = places.get(id(code))
            _, owner, prints = self._classify(code, frame) if place is None else place
            if owner is _USER:
                return code, frame.f_lasti, cause
            if prints:
                cause = Cause.PRINT
            if owner is _LIBRARY and library is None:
                library = code, frame.f_lasti
            frame = frame.f_back
        return (*library, cause) if library is not None else (None, 0, cause)

    def _classify(self, code: CodeType, frame: FrameType) -> tuple[CodeType, _Owner, bool]:
        owner = _owner_of(code.co_filename)
        prints = owner is _TORCH_ITSELF and code.co_name in {"_tensor_str", "_str", "_str_intern"}
        if owner is _USER and frame.f_globals.get("__name__", "").startswith("djinn_"):
            owner = _DJINN  # a plugin, in any install location
        self._classified[id(code)] = classified = code, owner, prints
        return classified


def line_of(place: UserPlace) -> tuple[str, int, str, str]:
    """Return file, line and function of a position, and the reason of the wait, refined by the line's text."""
    code, offset, cause = place
    if code is None:
        return "", 0, "", cause
    file, line = code.co_filename, line_of_site((code, offset))
    if _owner_of(file) is _USER:
        cause = _refine_cause(cause, linecache.getline(file, line))
    return file, line, code.co_name, cause


class _Owner(enum.Enum):
    DJINN, TORCH, LIBRARY, USER = range(4)


_DJINN, _TORCH_ITSELF, _LIBRARY, _USER = _Owner  # enum members are slow to look up


@functools.lru_cache(maxsize=4096)
def _owner_of(file: str) -> _Owner:
    if file.startswith(_DJINN_FOLDERS):
        return _DJINN
    if file.startswith(_TORCH):
        return _TORCH_ITSELF
    return _LIBRARY if file.startswith((*_LIBRARIES, "<")) else _USER


def _refine_cause(cause: str, text: str) -> str:
    """Return the cause of a wait. A wait for a number becomes a condition or a print if the line's text shows it."""
    if cause != Cause.NUMBER:
        return cause
    if "print(" in text:
        return Cause.PRINT
    return CONDITION if _DECIDES.search(text) and ".item()" not in text else cause
