"""Number of references to objects, on every version of Python."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final


def counts_beside(listed: Sequence[object]) -> list[int]:
    """For each object the number of references to it besides that of `listed`, a list or a tuple.

    How many a variable and an argument add depends on the interpreter: from 3.14 on a call borrows the variable's. So no variable
    refers to the objects here, and what counting itself adds is measured.
    """
    return [count - _OF_COUNTING for count in _counts(listed)]


def only_listed(listed: Sequence[object]) -> bool:
    """True if nothing beside `listed` refers to any of the objects, and each is in it once."""
    return {*map(sys.getrefcount, listed)} <= _ONLY_LISTED


def _counts(listed: Sequence[object]) -> list[int]:
    return list(map(sys.getrefcount, listed))


_OF_COUNTING: Final = _counts([object()])[0]
_ONLY_LISTED: Final = frozenset({_OF_COUNTING})
