"""Tensors at the edge of protected memory: out-of-bounds accesses of kernels crash at once."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

import torch

PAGE = mmap.PAGESIZE
ROOM = 4 * PAGE  # maximum bytes of one tensor
_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_C.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class GuardedMemory:
    """Slots of memory between guard pages, which are reused in rotation."""

    def __init__(self, places: int = 24) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        size = ROOM + 2 * PAGE
        self._starts: list[int] = []
        for _ in range(places):
            start = _C.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            if start in {None, ctypes.c_void_p(-1).value}:
                raise MemoryError
            if _C.mprotect(start, PAGE, 0) or _C.mprotect(start + PAGE + ROOM, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
            self._starts.append(start + PAGE)
        self._next = 0

    @classmethod
    @functools.cache
    def shared(cls) -> GuardedMemory:
        """Return the memory of the process, which forked children inherit."""
        return cls()

    def place(self, tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
        """Return a copy of `tensor` at the end or start of a slot. Return empty, large and lazy tensors unchanged."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if not 0 < size <= ROOM or tensor.is_conj() or tensor.is_neg():
            return tensor
        self._next = (self._next + 1) % len(self._starts)
        address = self._starts[self._next] + (ROOM - size if at_end else 0)
        ctypes.memmove(address, storage.data_ptr(), size)
        octets = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(octets.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def place_all(self, value: Any, at_end: bool) -> Any:
        """Return an argument with every tensor replaced by its copy in a slot."""
        if isinstance(value, torch.Tensor):
            return self.place(value, at_end)
        if isinstance(value, list | tuple):
            return type(value)(self.place_all(v, at_end) for v in value)
        return value
