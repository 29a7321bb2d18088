"""Cache of what calls return, by their arguments, and bounded memo tables. C++ is asked first (`djinn_native/csrc/calls.cpp`).

The tables are plain dicts, because a hit must cost one lookup and nothing else. The cache lives as long as its session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from djinn_core.ir.program import Call, Signature


from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def make_room(known: dict[K, V], limit: int) -> None:
    """Evict the older half of a table that has reached `limit`."""
    if len(known) >= limit:
        for old in list(known)[: limit // 2]:
            known.pop(old, None)


def keep(known: dict[K, V], key: K, value: V, limit: int) -> V:
    """Return the entry under `key`, after storing `value` where there was none."""
    if key not in known:
        make_room(known, limit)
    return known.setdefault(key, value)


Key = tuple[Any, ...]


class InferenceCache:
    """Inferred calls, and what executors taught of them. Not locked: each access is one operation of a dict.

    Attributes:
        calls: calls by key; `slots` of a call are those that its key tells, and where it does not, they are gathered each time.
            None if all that the call does is to return its operand once more.
        drawing: of these, random ones of indexes that are bound to a device; `calls` has None for them.
        kinds: of calls of factories that differ in sizes only, an example.
        signatures: equal signatures are one object, which has the layouts and dtypes that were learnt.
        supported: ops, with the dtypes and types of their arguments, that an executor was found to have kernels of.
        inferred: number of ops for which a meta kernel was run.
    """

    def __init__(self) -> None:
        self.calls: dict[Key, Call | None] = {}
        self.drawing: dict[Key, Call] = {}
        self.kinds: dict[Key, Call] = {}
        self.signatures: dict[object, Signature] = {}
        self.supported: set[Key] = set()
        self.inferred = 0


inference_cache: Final = InferenceCache()
