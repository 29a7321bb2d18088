"""Names of storages that identify their contents, for the keys of cached results."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from typing import Final

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from djinn_core.torch_private import storage_key
from djinn_core.wire.digests import digest_of_content
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.memory.spill import bytes_on_device, octets

MAX_ALWAYS_HASHED: Final = 64 << 10  # bytes of a storage that is hashed without an allowance, on all devices


@attrs.define
class ReadAllowance:
    """The number of bytes that may still be hashed for one cache key."""

    nbytes: int

    def take(self, nbytes: int) -> bool:
        """Reserve `nbytes` for hashing. Return False if they exceed the allowance."""
        fits = nbytes <= self.nbytes
        self.nbytes -= nbytes if fits else 0
        return fits


class StorageNames:
    """Names of a device's storages. Storages with equal names have equal bytes. Thread-safe.

    A name is the digest of the storage's bytes (32 bytes long), a position in a weight file (over 64 bytes), the key of a
    run's result (40 bytes), or a random number (32 bytes). A client cannot upload bytes whose digest equals a name of
    another kind. `forget` is called before a write.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._is_host = runtime.device.type == "cpu"
        self._names: dict[int, tuple[StorageWeakRef, bytes]] = {}
        self._max_entries = 1024  # entries before freed storages are dropped
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._names)

    def find(self, tensor: torch.Tensor) -> bytes | None:
        """Return the name of a tensor's storage, or None."""
        entry = self._names.get(storage_key(tensor))
        return entry[1] if entry is not None and not entry[0].expired() else None

    def name(self, tensor: torch.Tensor, allowance: ReadAllowance) -> bytes:
        """Return the name of a tensor's storage.

        A storage without a name gets one: the digest of its bytes if `allowance` suffices, else a random number.
        """
        known_name = self.find(tensor)
        if known_name is None:
            known_name = self._digest(tensor, allowance) or secrets.token_bytes(32)
            self.set_name(tensor, known_name)
        return known_name

    def _digest(self, tensor: torch.Tensor, allowance: ReadAllowance) -> bytes | None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes > MAX_ALWAYS_HASHED and not (self._is_host and allowance.take(nbytes)):
            return None
        if not self._is_host:
            storage = self._runtime.deliver(bytes_on_device(storage, tensor.device)).untyped_storage()
        return digest_of_content(octets(storage) if nbytes else b"")

    def set_name(self, tensor: torch.Tensor, name: bytes) -> None:
        """Set the name of a tensor's storage. Equal names must mean equal bytes."""
        with self._lock:
            self._names[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), name
            if len(self._names) > self._max_entries:
                self._names = {key: entry for key, entry in self._names.items() if not entry[0].expired()}
                self._max_entries = 2 * len(self._names) + 1024

    def forget(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Drop the names of storages, because they may be written."""
        with self._lock:
            for tensor in tensors:
                if tensor is not None:
                    self._names.pop(storage_key(tensor), None)
