"""Transfers between devices of one host: the receiver copies directly from the sender's device memory.

The sender copies a value on its device and exports the copy (`DeviceRuntime.export`). The copy lives until the receiver
acknowledges the transfer, or until the sender abandons its route to the receiver. Sessions with a journal transfer bytes,
because the journal stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import attrs
import msgspec
import torch

from djinn_core.logs import get_logger
from djinn_core.wire.peer_messages import Item, TransferHeader
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.peers.packed_values import Packed, bytes_of
from djinn_server.running.fair_share import FairShare

MIN_EXPORTED: Final = 64 << 10  # bytes of the smallest transfer for which an export is faster
_log = get_logger("djinn.server")


@attrs.frozen
class DeviceMemory:
    """Open and read device memory for the threads of transfers. Each call takes a turn on the device."""

    runtime: DeviceRuntime
    turns: FairShare

    def open(self, items: Sequence[Item]) -> list[torch.Tensor | memoryview] | None:
        """Return copies of exported memory by item, or None if an item cannot be opened."""
        try:
            with self.turns.share(), torch.inference_mode():
                return [self._open(item) if item.size else memoryview(b"") for item in items]
        except Exception as error:  # a plugin may raise anything; the sender then sends bytes
            _log.info("cannot open another executor's device memory: requesting bytes", error=str(error))
            return None

    def _open(self, item: Item) -> torch.Tensor:
        copy = self.runtime.open(item.exported)
        if copy.numel() != item.size or copy.dtype != torch.uint8:
            raise ValueError(f"an item announced {item.size:,} bytes, but exported {copy.numel():,} of {copy.dtype}")
        return copy

    def in_host_memory(self, items: Iterable[Packed]) -> list[Packed]:
        """Return items with their bytes in host memory."""
        return [self._in_host_memory(item, data) for item, data in items]

    def _in_host_memory(self, item: Item, data: torch.Tensor | memoryview) -> Packed:
        if not isinstance(data, torch.Tensor):
            return item, data
        with self.turns.share(), torch.inference_mode():
            return msgspec.structs.replace(item, exported=b""), bytes_of(self.runtime.deliver(data))


def export_items(items: Sequence[Packed], runtime: DeviceRuntime) -> list[Packed]:
    """Return items with descriptions of their memory, if the transfer is large and exportable; else with their bytes."""
    exports = []
    if sum(len(data) for _, data in items) >= MIN_EXPORTED:
        for item, data in items:
            description = runtime.export(data) if isinstance(data, torch.Tensor) else None
            exports.append((msgspec.structs.replace(item, exported=description or b""), data))
    if exports and all(item.exported for item, data in exports if len(data)):
        return exports
    return [(item, bytes_of(runtime.deliver(data)) if isinstance(data, torch.Tensor) else data) for item, data in items]


def without_exports(header: TransferHeader) -> TransferHeader:
    """Return a copy of `header` without exported memory, for values that are sent as bytes."""
    items = tuple([msgspec.structs.replace(item, exported=b"") for item in header.items])
    return msgspec.structs.replace(header, items=items)


def are_exported(items: Iterable[Packed]) -> bool:
    """Return True if the receiver must open the memory of these items."""
    return any(isinstance(data, torch.Tensor) for _, data in items)
