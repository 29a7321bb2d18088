"""The C call stack of the current thread, if the platform can report it."""

from __future__ import annotations

import ctypes
from itertools import takewhile
from typing import Any, Final

_FRAMES: Final = 64


class _Symbol(ctypes.Structure):
    """Information of the dynamic linker about an address: `Dl_info`."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def is_on_stack(library: bytes) -> bool:
    """Return True if the running Python code was called by C code of a library with `library` in its file name.

    Only C functions up to the next outer Python code count. Return False if the platform cannot tell. A signal handler
    may call this function, because it imports nothing.
    """
    if _entry is None:
        return False
    symbol, entries = _Symbol(), 0
    for address in _addresses():
        if _function_at(address) == _entry:
            entries += 1
            if entries > 1:  # the first address is in the caller
                return False
        elif _dladdr(ctypes.c_void_p(address), ctypes.byref(symbol)) and library in (symbol.file or b""):
            return True
    return False


def _addresses() -> list[int]:
    """Return the instruction addresses on this thread's C stack, innermost first."""
    stack = (ctypes.c_void_p * _FRAMES)()
    return [address or 0 for address in stack[: _backtrace(stack, _FRAMES)]]


class _Calls:
    """Record the C stack when C calls Python in different ways: for a filter, an operator or a key."""

    def __init__(self) -> None:
        self.stacks: list[list[int]] = []

    def look(self, _: object = None) -> bool:
        self.stacks.append([_function_at(address) or 0 for address in _addresses()])
        return True

    def __neg__(self) -> bool:
        return self.look()


def _find_entry() -> int | None:
    """Return the C function through which C enters Python: the outermost function that different kinds of calls share.

    Return None if they share none. The function is measured, because the interpreter's functions have no names since
    Python 3.14, and compilers split and merge them.
    """
    calls = _Calls()
    _ = [*filter(calls.look, (0,)), -calls, max((0,), key=calls.look)]
    same = [row[0] for row in takewhile(lambda row: len({*row}) == 1, zip(*calls.stacks, strict=False))]
    return (same[-1] or None) if same else None


def _linker_functions() -> tuple[Any, Any, Any]:
    """Return `backtrace`, `dladdr`, and a function that finds a function's start address; None for a missing one."""
    try:
        program = ctypes.CDLL(None)
    except TypeError:  # Windows has no `CDLL(None)`
        return None, None, None
    try:
        unwinder = ctypes.CDLL("libgcc_s.so.1")
    except OSError:  # macOS: its system library has it
        unwinder = program
    function_at = getattr(unwinder, "_Unwind_FindEnclosingFunction", None)
    if function_at is not None:
        function_at.restype, function_at.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    return getattr(program, "backtrace", None), getattr(program, "dladdr", None), function_at


# Looked up at import: a signal handler must not run code that an interrupt could abort.
_backtrace, _dladdr, _function_at = _linker_functions()
_entry: Final = _find_entry() if _backtrace and _dladdr and _function_at else None
