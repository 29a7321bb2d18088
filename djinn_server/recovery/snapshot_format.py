"""Format of snapshots: the serialized state of a session.

A journal is replaced by a snapshot every `--snapshot-seconds`, or earlier if it is large.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from djinn_core.errors import ProtocolError, SessionLost
from djinn_core.protocol.delivery.record_log import LazyBuffers
from djinn_core.wire.binding_delta import Slot
from djinn_core.wire.frames import Buffer
from djinn_core.wire.messages import Template, Workload
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.peer_messages import Item
from djinn_core.wire.timing_messages import TimingsRequest
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.peers.packed_values import storages_of_values, unpack_item
from djinn_server.recovery.log_records import PoolCounts
from djinn_server.running.random_state import set_state, state_from_bytes, state_to_bytes
from djinn_server.running.values import Stored, ValueTable

Number = bool | int | float | None | tuple[float, float]


class KnownTemplate(msgspec.Struct, frozen=True):
    """A template that the client may name by its digest, and the bindings of its last run."""

    digest: bytes
    template: Template
    slots: tuple[Slot, ...]
    inputs: tuple[int, ...]
    workload: Workload | None = None


class StoredValue(msgspec.Struct, frozen=True):
    """A value that is an unmodified view of a tensor in a weight file.

    `start`, `size`: bytes of the tensor `name` that the value needs. `offset`: of the value's first element, in elements
    from `start`.
    """

    handle: int
    address: str
    version: bytes
    name: str
    start: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Snapshot(msgspec.Struct, frozen=True):
    """State of a session between two frames. The bytes of `items` are separate buffers, in the same order.

    Attributes:
        numbers: values that are numbers, as pairs of handle and number. A complex number is a pair of real numbers.
        generators: states of random generators, as pairs of handle and state.
        random: the session's random state.
        pool: numbers of transfers. Records of transfers follow the snapshot.
        numeric_settings: PyTorch's numeric settings; None if the client sent none.
        stored: values that are read again from weight files.
        timings: the client's last request for timings; None without a request.
        promised: digests and sizes of blobs that a `BlobQueryReply` reported as stored and the client has not offered.
    """

    submissions: int
    templates: tuple[KnownTemplate, ...]
    items: tuple[Item, ...]
    numbers: tuple[tuple[int, Number], ...]
    generators: tuple[tuple[int, bytes], ...]
    random: bytes
    pool: PoolCounts = PoolCounts()
    numeric_settings: NumericSettings | None = None
    stored: tuple[StoredValue, ...] = ()
    timings: TimingsRequest | None = None
    promised: tuple[tuple[bytes, int], ...] = ()


# Created at import: msgspec crashes if two threads let it inspect a class for the first time at the same time.
_snapshots: msgspec.msgpack.Decoder[Snapshot] = msgspec.msgpack.Decoder(Snapshot)


def take_values(
    values: ValueTable, read: Callable[[torch.Tensor], memoryview], excluded: Container[int] = ()
) -> tuple[dict[str, Any], LazyBuffers] | None:
    """Return the snapshot fields of all values, and their memory as lazy buffers.

    Return None if a value cannot be serialized. `read`: returns the memory of a tensor when its buffer is accessed.
    `excluded`: handles to skip.
    """
    tensors: list[int] = []
    numbers: list[tuple[int, Number]] = []
    generators: list[tuple[int, bytes]] = []
    for handle, value in values.dense_items():
        if handle in excluded:
            continue
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
            if value.is_conj() or value.is_neg():
                return None
            tensors.append(handle)
        elif isinstance(value, torch.Generator):
            generators.append((handle, state_to_bytes(value.get_state())))
        elif isinstance(value, complex):
            numbers.append((handle, (value.real, value.imag)))
        elif value is None or isinstance(value, bool | int | float):
            numbers.append((handle, value))
        else:  # failures, whose memory may become valid again, and events
            return None
    storages = list(storages_of_values(tensors, values, 0))

    def memory(position: int) -> Buffer:
        tensor = storages[position][1]
        return read(tensor) if tensor is not None else b""

    items = tuple([item for item, _ in storages])
    fields = {"items": items, "numbers": tuple(numbers), "generators": tuple(generators)}
    return fields, LazyBuffers([item.size for item in items], memory)


def put_values(snapshot: Snapshot, body: Sequence[memoryview], values: ValueTable, runtime: DeviceRuntime) -> None:
    """Restore the values of a snapshot.

    Raises:
        SessionLost: the fields of the snapshot contradict each other.
    """
    try:
        for handle, value in _values(snapshot, body, runtime):
            values[handle] = value
    except (ProtocolError, RuntimeError, ValueError, OverflowError, TypeError) as error:
        raise SessionLost(f"the snapshot in a journal is inconsistent: {error}") from error


def _values(snapshot: Snapshot, body: Iterable[memoryview], runtime: DeviceRuntime) -> Iterator[tuple[int, Stored]]:
    for item, data in zip(snapshot.items, body, strict=True):
        yield from unpack_item(item, data, runtime)
    for handle, number in snapshot.numbers:
        yield handle, complex(*number) if isinstance(number, tuple) else number
    for handle, state in snapshot.generators:
        generator = torch.Generator(device=runtime.device)
        set_state(generator, state_from_bytes(state))
        yield handle, generator


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Serialize a snapshot to MessagePack."""
    return msgspec.msgpack.encode(snapshot)


def decode_snapshot(data: bytes) -> Snapshot:
    """Deserialize a snapshot from MessagePack.

    Raises:
        SessionLost: the data is not a valid snapshot.
    """
    try:
        return _snapshots.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SessionLost(f"the snapshot in a journal cannot be decoded: {error}") from error
