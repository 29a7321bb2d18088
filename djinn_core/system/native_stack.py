"""The stack of C functions of the present thread, where the platform can tell it."""

from __future__ import annotations

import ctypes
from itertools import takewhile
from typing import Any, Final

_FRAMES: Final = 64


class _Symbol(ctypes.Structure):
    """The dynamic linker's information on an address: `Dl_info`."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def stands_between(library: bytes) -> bool:
    """True if code of a library with `library` in its file's name stands between the caller, which C called, and the next Python code.

    False where the platform does not tell. No step of it is one in which an interrupt is lost.
    """
    if _entry is None:
        return False
    symbol, entries = _Symbol(), 0
    for address in _addresses():
        if _function_at(address) == _entry:
            entries += 1
            if entries > 1:  # the first is the caller's
                return False
        elif _dladdr(ctypes.c_void_p(address), ctypes.byref(symbol)) and library in (symbol.file or b""):
            return True
    return False


def _addresses() -> list[int]:
    """Addresses in the C functions of this thread, the innermost first."""
    stack = (ctypes.c_void_p * _FRAMES)()
    return [address or 0 for address in stack[: _backtrace(stack, _FRAMES)]]


class _Calls:
    """Keeps the functions of the stack each time it is called: by filter, by an operator, for a key."""

    def __init__(self) -> None:
        self.stacks: list[list[int]] = []

    def look(self, _: object = None) -> bool:
        self.stacks.append([_function_at(address) or 0 for address in _addresses()])
        return True

    def __neg__(self) -> bool:
        return self.look()


def _measured_entry() -> int | None:
    """The C function by way of which C enters Python code: the outermost that is the same for different ways of calling.

    Measured: the interpreter's own functions have no names from Python 3.14 on, and compilers divide and join them.
    """
    calls = _Calls()
    _ = [*filter(calls.look, (0,)), -calls, max((0,), key=calls.look)]
    same = [row[0] for row in takewhile(lambda row: len({*row}) == 1, zip(*calls.stacks, strict=False))]
    return (same[-1] or None) if same else None


def _looked_up() -> tuple[Any, Any, Any]:
    """`backtrace`, `dladdr` and what finds the beginning of the function at an address; None where there is none."""
    try:
        program = ctypes.CDLL(None)
    except TypeError:  # Windows has no library of all names
        return None, None, None
    try:
        unwinder = ctypes.CDLL("libgcc_s.so.1")
    except OSError:  # macOS: its system library has it
        unwinder = program
    function_at = getattr(unwinder, "_Unwind_FindEnclosingFunction", None)
    if function_at is not None:
        function_at.restype, function_at.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    return getattr(program, "backtrace", None), getattr(program, "dladdr", None), function_at


# Looked up here: in the handler of a signal nothing may run that an interrupt could be raised in.
_backtrace, _dladdr, _function_at = _looked_up()
_entry: Final = _measured_entry() if _backtrace and _dladdr and _function_at else None
