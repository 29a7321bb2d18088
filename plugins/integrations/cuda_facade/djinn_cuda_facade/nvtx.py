"""`torch.cuda.nvtx`: marks for NVIDIA's profilers, which cannot look into an executor from here. They are counted only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Depth(threading.local):
    ranges = 0


_depth = _Depth()


def range_push(msg: str) -> int:
    """Begin a nested range; the depth of its beginning."""
    del msg
    _depth.ranges += 1
    return _depth.ranges - 1


def range_pop() -> int:
    """End the innermost range; the depth that is left, or -2 if there was none, as NVTX says."""
    if _depth.ranges == 0:
        return -2
    _depth.ranges -= 1
    return _depth.ranges


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
