"""`tensor._lazy_clone()`: a copy that is made at the first write to it or to its source, as PyTorch's allocator does on the CPU.

The executor copies late, and the client says what PyTorch's functions about such memory say: whether it is shared still, and
at which address it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from djinn_core.interception.dispatch import handles, record
from djinn_core.interception.native import library as native
from djinn_core.interception.tensors.element_copies import ElementCopy
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.interception.tensors.remote_storage import address_of, reserve_addresses
from djinn_core.interception.tensors.storage import Storage
from djinn_core.torch_objects import wrap_memory_questions

_LAZY_CLONE: Final = torch.ops.aten._lazy_clone.default  # noqa: SLF001 - PyTorch's name of the op


class SharedAddresses:
    """Addresses that storages have in common until they are written.

    Attributes:
        addresses: of all of them. holders: storages that have them; those that are gone are counted as well.
    """

    def __init__(self, storage: Storage, address: int) -> None:
        if native.ON and storage.addresses is None:
            storage.addresses = range(address, address + storage.nbytes)
        address_of(storage)
        self.addresses = storage.addresses or range(0)
        self.holders = 1


@handles(_LAZY_CLONE)
def lazy_clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the op, and note that both memories are one until a write."""
    made = record(func, args, kwargs)
    source, copy = args[0].remote.storage, made.remote.storage
    _settle(source)
    known = _known(source)
    if known.shared is None:
        known.shared = SharedAddresses(source, args[0].untyped_storage().data_ptr())
    known.shared.holders += 1
    _known(copy).shared = known.shared
    copy.addresses, copy.sharing = known.shared.addresses, known.shared
    source.sharing = known.shared
    return made


def _known(storage: Storage) -> ElementCopy:
    """Knowledge of the contents of the storage, which the next write drops."""
    found = storage.elements
    if found is None:
        found = storage.elements = ElementCopy()
    return found


def is_shared(tensor: LazyTensor) -> bool:
    """True if the memory of the tensor is another's as well, until one of them is written."""
    found = tensor.remote.storage.elements
    return found is not None and found.shared is not None


def _settle(storage: Storage) -> None:
    """Give a storage that was written addresses of its own, unless it is the last one at those that it had in common."""
    shared, known = storage.sharing, storage.elements
    if shared is None or (known is not None and known.shared is shared):
        return
    storage.sharing = None
    if shared.holders > 1:
        shared.holders -= 1
        storage.addresses = reserve_addresses(storage.nbytes)


def _address(tensor: LazyTensor) -> int:
    _settle(tensor.remote.storage)
    shared = tensor.remote.storage.addresses
    return shared.start if native.ON and shared is not None else tensor.data_ptr()


def _number(tensor: LazyTensor) -> int:
    return tensor.remote.storage.id


def _for_remote(answer: Callable[[LazyTensor], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def ask(tensor: torch.Tensor) -> Any:
            return answer(tensor) if isinstance(tensor, LazyTensor) else plain(tensor)

        return ask

    return wrap


def register() -> None:
    """Have PyTorch's functions about memory answer for remote tensors."""
    wrap_memory_questions(_is_cow_tensor=_for_remote(is_shared), _data_address=_for_remote(_address))
    if not native.ON:
        wrap_memory_questions(_storage_address=_for_remote(_number))
