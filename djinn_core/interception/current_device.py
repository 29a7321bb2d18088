"""The index that `remote_accelerator` without an index stands for, by thread."""

from __future__ import annotations

import threading


class _Current(threading.local):
    index = 0


_current = _Current()


def current_device() -> int:
    """The present thread's index."""
    return _current.index


def set_current_device(index: int) -> int:
    """Make `index` the present thread's; returns the one before."""
    before, _current.index = _current.index, index
    return before
