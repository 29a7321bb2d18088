"""Cache of inferred calls by their arguments, and bounded memo tables.

C++ is asked first (`djinn_native/csrc/calls.cpp`). The tables are plain dicts, because a hit must cost only one lookup.
The cache lives as long as its session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from djinn_core.ir.program import Call, Signature


from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def make_room(table: dict[K, V], limit: int) -> None:
    """Evict the older half of a table that has reached `limit` entries."""
    if len(table) >= limit:
        for old_key in list(table)[: limit // 2]:
            table.pop(old_key, None)


def keep(table: dict[K, V], key: K, value: V, limit: int) -> V:
    """Return the entry under `key`. If the table has no such entry, store `value` under `key` first."""
    if key not in table:
        make_room(table, limit)
    return table.setdefault(key, value)


Key = tuple[Any, ...]


class InferenceCache:
    """Inferred calls, and metadata learnt from executors. Not locked: each access is one dict operation.

    Attributes:
        calls: calls by key. `call.slots` are the scalars of the key. If `call.slots` is None, each call gathers its
            scalars. The entry is None if the op returns its operand, or if the call is in `drawing`.
        drawing: the calls of random ops on indexes that are bound to a device, by key.
        kinds: for factories that differ only in sizes, one example call, by the key without sizes.
        signatures: interned signatures, with their learnt layouts and dtypes.
        supported: ops, with argument dtypes and types, for which an executor has a kernel.
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
