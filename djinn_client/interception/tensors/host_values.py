"""Contents of small storages that the client knows, or can compute from others that it knows, without asking an executor.

A program that uploads a mask, adds a column of ones to it and asks whether all of it is true needs no executor for the reply. What
an op makes of known operands is computed when a number is asked for, and not at all where none is. A value never changes: the
first recorded write to the storage takes it from the storage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol
from weakref import ref

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.recording.recorder import recorders
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.storage import Value
from djinn_client.tracebacks import for_users
from djinn_core.ir.values import TensorMeta

LARGEST: Final = 1 << 18  # bytes of a storage whose contents are known: an attention mask of 8 x 4,000
LARGEST_OF_FLOATS: Final = 1 << 12  # the same where they are floats: weights are no concern of the client
INTEGERS: Final = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
BUDGET: Final = 1 << 24  # bytes of all that were uploaded or computed
_OVERHEAD: Final = 1024  # bytes that are counted for each beside its own
DEEPEST: Final = 32  # ops between a value and those that are here; beyond, the program does not ask for numbers


class FoldOperand(Protocol):
    """A tensor that an op was called with."""

    @property
    def depth(self) -> int:
        """As of a `HostValue`."""

    def tensor(self) -> torch.Tensor | None:
        """The tensor on the CPU, not to be changed; None if it is not known."""


class HostOperand(NamedTuple):
    """A tensor over known contents."""

    value: HostValue
    meta: TensorMeta

    @property
    def depth(self) -> int:
        """That of its contents."""
        return self.value.depth

    def tensor(self) -> torch.Tensor | None:
        """The tensor on the CPU, not to be changed; None if its contents were dropped."""
        memory = self.value.memory()
        meta = self.meta
        if memory is None or meta.conj or meta.neg or meta.extent * meta.dtype.itemsize > memory.nbytes:
            return None
        return _view_of(memory, meta)


class HostValue:
    """The contents of a storage: its bytes, or the op that makes them.

    Attributes:
        depth: ops between it and the values whose bytes are here.
    """

    __slots__ = ("__weakref__", "_changes", "_memory", "_source", "depth")
    depth: int

    def __init__(self, memory: torch.Tensor | None, source: _Source | None = None) -> None:
        self._memory = memory
        self._source = source
        self._changes = port.memory_changes
        self.depth = 0 if source is None else 1 + max([o.depth for o in source.operands], default=0)

    def memory(self) -> torch.Tensor | None:
        """The bytes; None if they were dropped, or the session in which they were known has ended."""
        if self._changes != port.memory_changes:
            return None
        source = self._source
        if source is not None:
            self._memory, self._source, self.depth = source.compute(), None, 0
            if self._memory is not None:
                _keep(self, self._memory.nbytes)
        return self._memory

    def become(self, elements: torch.Tensor) -> None:
        """Take the elements of the whole storage, which were fetched. They may lie in the memory of a whole reply."""
        self._memory = elements.clone()
        _keep(self, elements.nbytes)

    def drop(self) -> None:
        """Forget the contents."""
        self._memory = self._source = None


class _Source(NamedTuple):
    """An op that makes a value of known operands."""

    call: Callable[[list[torch.Tensor]], torch.Tensor]
    operands: Sequence[FoldOperand]
    meta: TensorMeta

    def compute(self) -> torch.Tensor | None:
        """The bytes that the op makes; None if an operand was dropped, or PyTorch refuses the op here."""
        given = [operand.tensor() for operand in self.operands]
        if any(one is None for one in given):
            return None
        meta = self.meta
        with torch.inference_mode():
            try:
                made = self.call(given)  # type: ignore[arg-type]
            except (RuntimeError, ValueError, TypeError, IndexError):  # the executor says what is wrong
                return None
            if made.dtype != meta.dtype or tuple(made.shape) != meta.shape:
                return None
            memory = torch.empty(meta.nbytes, dtype=torch.uint8, device="cpu")
            _view_of(memory, meta).copy_(made)
        return memory


def known_elements(value: Value) -> torch.Tensor | None:
    """The elements of a value that the client knows, not to be changed.

    None as well where the program is watched, seen by modes, or recorded to run with other contents; and where there is no session
    yet, because a program's first number tells that there is a server.
    """
    recorder, host = recorders.thread.recorder, value.storage.host
    if (
        host is None
        or not port.is_open()
        or recorder.captures
        or recorder.watcher is not None
        or torch_dispatch.dispatch_modes()
    ):
        return None
    return HostOperand(host, value.meta).tensor()


def _keep(value: HostValue, nbytes: int) -> None:
    """Count the bytes of a value that has them from now on; beyond `BUDGET` drop those of the oldest."""
    kept = device_state.host_values
    kept.append((ref(value), nbytes + _OVERHEAD))
    device_state.host_bytes += nbytes + _OVERHEAD
    try:
        while device_state.host_bytes > BUDGET:
            oldest, size = kept.popleft()
            device_state.host_bytes -= size
            if (dropped := oldest()) is not None:
                dropped.drop()
    except IndexError:  # several threads count without a lock: what was counted twice is gone with the last one
        device_state.host_bytes = 0


def known(plain: torch.Tensor) -> HostValue | None:
    """The contents of memory that is a copy of `plain`, a dense tensor on the CPU; None if they are too large to be known."""
    most = LARGEST if plain.dtype in INTEGERS else LARGEST_OF_FLOATS if plain.dtype in _FLOATS else 0
    if not 0 < plain.nbytes <= most:
        return None
    with torch.inference_mode():
        memory = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).clone()
    value = HostValue(memory)
    _keep(value, memory.nbytes)
    return value


def computed(
    call: Callable[[list[torch.Tensor]], torch.Tensor], operands: Sequence[FoldOperand], meta: TensorMeta
) -> HostValue | None:
    """The result of `call` for these operands, with metadata `meta` over a storage of its own; None if too many ops lead to it."""
    value = HostValue(None, _Source(call, operands, meta))
    return value if value.depth <= DEEPEST else None


def _view_of(memory: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    with torch.inference_mode():
        return torch.empty(0, dtype=meta.dtype, device="cpu").set_(
            memory.untyped_storage(), meta.offset, meta.shape, meta.stride
        )


def tolist(plain: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """`Tensor.tolist` that makes no round trip where the client knows the elements."""

    @functools.wraps(plain)
    def listed(self: torch.Tensor) -> Any:
        if isinstance(self, LazyTensor) and self.remote.storage.host is not None:
            known = known_elements(self.remote)
            return plain(self if known is None else known)
        return plain(self)

    return for_users(listed)
