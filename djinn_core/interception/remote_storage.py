"""`tensor.untyped_storage()` of a remote tensor: which memory it looks into and how large that is, without the memory.

Libraries find tied weights by comparing storages; `torch.load(map_location="remote_accelerator:0")` makes storages first
and tensors over them afterwards. Both work with a storage that has a size, an address of its own and no bytes.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.values import new_storage

_ADDRESS_STEP = 64


class RemoteStorage(torch.UntypedStorage):
    """A storage on a remote device; what reads or writes its bytes is refused.

    Attributes:
        base: the tensor that it was asked of, or None.
        source: bytes on this machine that become its content when a tensor is made over it, or None.
    """

    base: Any
    source: torch.UntypedStorage | None
    _device: torch.device
    _address: int
    _nbytes: int

    @classmethod
    def of_tensor(cls, tensor: Any) -> RemoteStorage:
        """The storage that `tensor` looks into."""
        storage = tensor.remote.storage
        made = cls._make(tensor.device, storage.id, storage.nbytes)
        made.base = tensor
        return made

    @classmethod
    def of_bytes(cls, source: torch.UntypedStorage, device: torch.device) -> RemoteStorage:
        """A storage on `device` whose content is `source`, which must not change any more."""
        made = cls._make(device, new_storage(), source.nbytes())
        made.source = source
        return made

    @classmethod
    def _make(cls, device: torch.device, number: int, nbytes: int) -> RemoteStorage:
        made = cls(0)
        made.base = made.source = None
        made._device, made._address, made._nbytes = device, number * _ADDRESS_STEP, nbytes
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The logical device."""
        return self._device

    def data_ptr(self) -> int:
        """A number that storages of different memory do not share; no address on this machine."""
        return self._address

    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    def size(self) -> int:
        """Size in bytes."""
        return self._nbytes

    def __len__(self) -> int:
        return self._nbytes

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedOperation(
            f"the bytes of a storage on {self._device} are not on this machine: use the tensor, or tensor.cpu()"
        )

    __getitem__ = __setitem__ = __iter__ = __copy__ = __deepcopy__ = __reduce__ = _refuse
    byteswap = clone = copy_ = cpu = fill_ = resize_ = to = tolist = _refuse
