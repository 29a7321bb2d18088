"""`tensor.untyped_storage()` of a remote tensor: a storage object whose bytes are on the executor.

Libraries find tied weights by comparing storages, `torch.save` saves storages and tensors that look into them, and
`torch.load(map_location="remote_accelerator:0")` makes storages first and tensors over them afterwards. There is one
`RemoteStorage` for all tensors over the same memory, as PyTorch has one storage object for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from djinn_core import torch_objects, torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.interception.device.device_state import device_state
from djinn_core.ir.handles import make_handle, new_storage

if TYPE_CHECKING:
    from djinn_core.interception.tensors.storage import Storage

_PAGE = 4096


def reserve_addresses(nbytes: int) -> range:
    """Reserve `nbytes` addresses that were not given out before: numbers that no two storages share, with nothing behind them."""
    pages = nbytes // _PAGE + 1
    made = range(device_state.next_address, device_state.next_address + pages * _PAGE)
    device_state.next_address = made.stop
    return made


def address_of(storage: Storage) -> int:
    """The first address of `storage`; another one when it has grown beyond what was reserved for it."""
    if not storage.nbytes:
        return 0
    reserved = storage.addresses
    if reserved is None or len(reserved) < storage.nbytes:
        reserved = storage.addresses = reserve_addresses(storage.nbytes)
    return reserved.start


class _Carrier(torch.Tensor):
    """A tensor without memory: PyTorch makes storages for devices without an allocator only below a tensor of such a class."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        return NotImplemented


class RemoteStorage(torch.UntypedStorage):
    """A storage on a remote device. Reading its bytes fetches them; sharing them is refused.

    Attributes:
        base: a tensor that looks into it; None until the first is made.
        source: bytes on this machine that become its content when the first tensor is made over it, or None.
    """

    base: Any
    source: torch.UntypedStorage | None
    _device: torch.device
    _number: int
    _reserved: range | None

    @classmethod
    def of_tensor(cls, tensor: Any) -> RemoteStorage:
        """The storage that `tensor` looks into; the tensor is the storage's from now on."""
        number = tensor.remote.storage.id
        made = device_state.storages.get(number)
        if made is None:
            made = cls._make(tensor.device, number)
            made.base = tensor
            device_state.storages[number] = made
        expected = device_state.thread.expected
        if expected is not None:
            expected.saw(made)
        return made

    @classmethod
    def of_bytes(cls, source: torch.UntypedStorage, device: torch.device) -> RemoteStorage:
        """A storage on `device` whose content is `source`, which must not change any more."""
        made = cls._make(device, new_storage())
        made.source = source
        return made

    @classmethod
    def _make(cls, device: torch.device, number: int) -> RemoteStorage:
        # C++ asks the storage for its device, in `torch.tensor(storage)`, and finds this object again by it.
        carrier = torch_private.make_wrapper(_Carrier, (0,), (1,), 0, torch.uint8, device)
        made: RemoteStorage = carrier.untyped_storage()
        made.__class__ = cls
        made.base = made.source = made._reserved = None
        made._device, made._number = device, number
        return made

    def look_as(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `dtype` that looks into this storage; its shape is whatever it is."""
        with torch.no_grad():
            if self.base is None:
                assert self.source is not None
                whole = self.source.nbytes() // dtype.itemsize * dtype.itemsize == self.source.nbytes()
                plain = torch.empty(0, dtype=dtype if whole else torch.uint8, device="cpu").set_(self.source)
                self.base, self.source = plain.to(self._device), None
                self.base.remote.storage.addresses = self._reserved
                device_state.storages[self.base.remote.storage.id] = self
            base: torch.Tensor = self.base
            if base.dtype == dtype and not base.is_conj() and not base.is_neg():
                return base
            return self.octets()[: self.nbytes() // dtype.itemsize * dtype.itemsize].view(dtype)

    def octets(self) -> torch.Tensor:
        """All bytes, as a remote tensor that looks into this storage."""
        with torch.no_grad():
            base = self.look_as(torch.uint8) if self.base is None else torch_private.without_bits(self.base)
            first = base.as_strided((0,), (1,), 0)
            octets = first if first.dtype == torch.uint8 else first.view(torch.uint8)
            return octets.as_strided((self.nbytes(),), (1,), 0)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The logical device."""
        return self._device

    @property
    def _cdata(self) -> int:  # what libraries tell storages apart by; PyTorch's own are addresses
        return self._number

    def data_ptr(self) -> int:
        """A number that storages of different memory do not share; no address on this machine. 0 if there are no bytes."""
        if self.base is not None:
            return address_of(self.base.remote.storage)
        if self._reserved is None:
            self._reserved = reserve_addresses(self.nbytes())
        return self._reserved.start if self.nbytes() else 0

    def nbytes(self) -> int:
        """Size in bytes."""
        if self.base is not None:
            memory = self.base.remote.storage
            return int(memory.nbytes if memory.shrunk is None else memory.shrunk)
        assert self.source is not None
        return self.source.nbytes()

    size = __len__ = nbytes

    def cpu(self) -> torch.UntypedStorage:
        """The bytes, on this machine: one round trip, for all storages that are saved together."""
        if self.source is not None:
            copied: torch.UntypedStorage = self.source.clone()
            return copied
        expected = device_state.thread.expected
        octets = expected.take(self.key) if expected is not None else None
        whole: torch.Tensor = self.octets().cpu() if octets is None else octets
        return whole.untyped_storage()

    @property
    def key(self) -> int:
        """Key of the storage among values: a handle that none of its tensors has."""
        return make_handle(self.base.remote.storage.id, 0)

    def tolist(self) -> list[int]:
        """The bytes as numbers: one round trip."""
        numbers: list[int] = self.octets().tolist()
        return numbers

    def __getitem__(self, index: Any) -> Any:
        return self.octets()[index].item() if isinstance(index, int) else self.cpu()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.octets()[index] = value

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __repr__(self) -> str:
        numbers = "\n ".join(str(number) for number in self.tolist())
        return f" {numbers}\n[torch.storage.UntypedStorage(device={self._device}) of size {self.nbytes()}]"

    def fill_(self, value: int) -> RemoteStorage:
        """Write `value` to every byte."""
        self.octets().fill_(value)
        return self

    def copy_(self, source: Any, _non_blocking: bool | None = None) -> Any:
        """Take over the bytes of another storage of this size, remote or on the CPU."""
        if isinstance(source, RemoteStorage):
            self.octets().copy_(source.octets())
        else:
            self.octets().copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(source))
        return self

    def clone(self) -> RemoteStorage:
        """A storage of its own with the same bytes."""
        made: RemoteStorage = self.octets().clone().untyped_storage()  # type: ignore[assignment]
        return made

    def to(self, *, device: Any, **_: Any) -> torch.UntypedStorage:
        """This storage, or its bytes on another device."""
        target = torch.device(device)
        if target.type == self._device.type and target.index in {None, self._device.index}:
            return self
        return self.cpu() if target.type == "cpu" else self.octets().to(target).untyped_storage()

    def resize_(self, size: int) -> RemoteStorage:
        """Make room for `size` bytes. Where these are fewer than before, the executor keeps its memory until the last tensor is gone."""
        octets = self.octets()
        memory = octets.remote.storage  # type: ignore[attr-defined]
        memory.shrunk = None
        if size > memory.nbytes:
            octets.resize_(size)
        elif size < memory.nbytes:
            memory.shrunk = size
        return self

    def is_shared(self) -> bool:
        """Memory of an accelerator counts as shared: it need not be moved to be sent to another process."""
        return True

    def __reduce__(self) -> Any:
        return _remake, (self.cpu(), str(self._device))

    def _write_file(self, *arguments: Any) -> None:
        torch_objects.write_storage(self.cpu(), *arguments)

    def _set_from_file(self, *arguments: Any) -> RemoteStorage:
        # What `torch.save` wrote in its old format: tensors are made first, and their storages filled afterwards.
        read = torch_objects.read_storage(self.nbytes(), *arguments)
        if self.base is None:
            self.source = read
            return self
        self.copy_(read)
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedOperation(
            f"the bytes of a storage on {self._device} are not on this machine: use the tensor, or tensor.cpu()"
        )

    byteswap = _share_fd_cpu_ = _share_filename_cpu_ = _share_cuda_ = _refuse


def _remake(source: torch.UntypedStorage, device: str) -> RemoteStorage:
    """A storage that was sent to this process."""
    return RemoteStorage.of_bytes(source, torch.device(device))


def new_on(device: torch.device, content: int | Any) -> RemoteStorage:
    """`torch.UntypedStorage(content, device=device)`: of `content` bytes, or with the given ones."""
    if isinstance(content, int):
        octets = torch.empty(content, dtype=torch.uint8, device=device)
    else:
        octets = torch.tensor(list(content), dtype=torch.uint8, device=device)
    made: RemoteStorage = octets.untyped_storage()  # type: ignore[assignment]
    return made
