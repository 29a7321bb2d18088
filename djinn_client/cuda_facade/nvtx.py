"""`torch.cuda.nvtx`: ranges for NVIDIA's profilers, which cannot look into an executor from here.

They are ranges of `torch.profiler.record_function` in their place, which `djinn.profile()` shows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import record_function


class _OpenRanges(threading.local):
    def __init__(self) -> None:
        self.ranges: list[record_function] = []


_open = _OpenRanges()


def range_push(msg: str) -> int:
    """Begin a nested range; the depth of its beginning."""
    begun = record_function(msg)
    begun.__enter__()
    _open.ranges.append(begun)
    return len(_open.ranges) - 1


def range_pop() -> int:
    """End the innermost range; the depth that is left, or -2 if there was none, as NVTX says."""
    if not _open.ranges:
        return -2
    _open.ranges.pop().__exit__(None, None, None)
    return len(_open.ranges)


def range_start(msg: str) -> int:
    """Begin a range that any thread may end; its number."""
    del msg
    return 0


def range_end(range_id: int) -> None:
    """End a range."""


def mark(msg: str) -> None:
    """Mark a moment."""


@contextmanager
def nvtx_range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """A block, or a decorated function, as a range."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()


FUNCTIONS = {
    "mark": mark,
    "range": nvtx_range,
    "range_end": range_end,
    "range_pop": range_pop,
    "range_push": range_push,
    "range_start": range_start,
}
