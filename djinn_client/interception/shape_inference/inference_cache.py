"""Cache of what calls return, by their arguments. C++ is asked first (`djinn_native/csrc/calls.cpp`). The cache lives as long as its session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from djinn_client.interception.shape_inference.formulas import KindOfCalls
    from djinn_core.ir.program import Call, Signature

Key = tuple[Any, ...]


class InferenceCache:
    """Inferred calls, and what executors taught of them. Not locked: each access is one operation of a dict.

    Attributes:
        calls: calls by key; `slots` of a call are those that its key tells, and where it does not, they are gathered each time.
            None if all that the call does is to return its operand once more.
        drawing: of these, random ones of indexes that are bound to a device; `calls` has None for them.
        kinds: examples of calls that differ in sizes and scalars only.
        signatures: equal signatures are one object, which has the layouts and dtypes that were learnt.
        supported: ops, with the dtypes and types of their arguments, that an executor was found to have kernels of.
        lacking: by the same and the dtypes of the operands, whether the CPU of the client has no kernel.
    """

    def __init__(self) -> None:
        self.calls: dict[Key, Call | None] = {}
        self.drawing: dict[Key, Call] = {}
        self.kinds: dict[Key, KindOfCalls] = {}
        self.signatures: dict[object, Signature] = {}
        self.supported: set[Key] = set()
        self.lacking: dict[Key, bool] = {}


inference_cache: Final = InferenceCache()
