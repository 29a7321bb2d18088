"""Room on the stack: what takes locks and numbers messages begins only where it can go on to its end.

Near Python's limit of recursion any call raises `RecursionError`, the release of a lock as well: a lock that stays taken stops
the session for ever.
"""

from __future__ import annotations

import sys
from typing import Final

LEVELS: Final = 150  # that sending and receiving take, and errors on their way out


def require_stack_room() -> None:
    """Raise `RecursionError` where fewer than `LEVELS` calls can be nested here; nothing has been done then."""
    try:
        # Calls of C functions count as well, and have no frame: a stack with a third of the frames may be full.
        sys._getframe(sys.getrecursionlimit() // 3)  # noqa: SLF001 - the only way to see how deep it is without a walk
    except ValueError:
        return
    _descend(LEVELS)


def _descend(levels: int) -> None:
    if levels:
        _descend(levels - 1)
