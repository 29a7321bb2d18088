"""LazyTensor: a tensor whose memory is on an executor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from djinn_core import torch_private
from djinn_core.front_end import preformatted
from djinn_core.interception.device.device_state import DEVICE_NAME, device_state
from djinn_core.interception.native import library as native
from djinn_core.interception.runtime_interface import port
from djinn_core.interception.tensors import copies
from djinn_core.interception.tensors.host_values import known_elements
from djinn_core.interception.tensors.remote_storage import RemoteStorage, address_of
from djinn_core.interception.tensors.storage import Storage, Value
from djinn_core.ir.values import TensorMeta
from djinn_core.printable import size_text
from djinn_core.tracebacks import for_users, shorten


def is_remote(device: torch.device) -> bool:
    """True if tensors on `device` are remote."""
    return device.type in device_state.names


def device_type() -> str:
    """The name that the user's program has for the remote device: `remote_accelerator`, under `djinn run` `cuda`."""
    return device_state.names[-1]


def go_by(name: str) -> None:
    """From now on the user's program calls the remote device `name`; its own name goes on being understood."""
    device_state.names.append(name)


def _on_fetched(plain: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The method `plain` of CPU tensors, which calls a Python function for each element, on fetched copies; its result is uploaded."""

    def method(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        fetched = self.cpu()  # with its history, about which PyTorch has an error of its own
        plain(fetched, *(a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments))
        self.data.copy_(fetched)  # PyTorch's method leaves `_version` unchanged
        return self

    method.__name__, method.__doc__ = plain.__name__, plain.__doc__
    return for_users(method)


def _list_of(self: torch.Tensor) -> Any:
    known = None if self.remote.storage.host is None else known_elements(self.remote)  # type: ignore[attr-defined]
    return _plain_list_of(self if known is None else known)


_plain_list_of: Final = torch.Tensor.tolist


def replace_methods() -> None:
    """Have `apply_`, `map_` and `map2_` work for the native device, whose tensors are of PyTorch's class, and `tolist` use known elements."""
    torch.Tensor.tolist = _where_it_is(_plain_list_of, for_users(_list_of))  # type: ignore[method-assign]
    for name in ("apply_", "map_", "map2_"):
        plain = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, _where_it_is(plain, _on_fetched(plain)))


def _where_it_is(plain: Callable[..., Any], there: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(self: torch.Tensor, *arguments: Any) -> Any:
        return (there if isinstance(self, LazyTensor) else plain)(self, *arguments)

    return method


def _on_own_index(plain: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Wrap the method `plain` so that its result is on the tensor's device index unless the call names a device.

    PyTorch selects the index by a C++ device guard, which a Python backend does not have.
    """

    @functools.wraps(plain)
    def method(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if plain is torch.Tensor.new_tensor or not any(
            isinstance(a, (torch.Tensor, torch.UntypedStorage)) for a in args
        ):
            options.setdefault("device", self.device)
        return plain(self, *args, **options)

    return for_users(method)


_handlers: Final = device_state.handlers


class LazyTensor(torch.Tensor):
    """A tensor on `remote_accelerator`: metadata here, memory on an executor.

    Shape, strides, dtype and device are known without a message. Ops on it are recorded, not computed.
    """

    __module__ = f"torch.{DEVICE_NAME}"  # where PyTorch's graphs find it; libraries tell by it whose array a tensor is (opt_einsum)
    remote: Value
    depth = 0  # views between this one and its base
    hidden = False  # True for a base made by `inplace_views`: its first view is a base to the user

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> torch.nn.Parameter:  # type: ignore[misc]
        """A parameter, because libraries make parameters again as `type(parameter)(data, requires_grad)`."""
        return torch.nn.Parameter(data, requires_grad)

    __torch_function__ = torch_private.disabled_torch_function  # type: ignore[assignment]

    @classmethod
    @torch_private.never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As `dispatch`, without its frame. Where a tensor of another class that overrides ops takes part, leave it to that."""
        if len(types) > 1 and any(map(_overrides_ops, types)):
            return NotImplemented
        try:
            handler, around = _handlers.get(id(func), port.record), port.around
            if around is None:
                return handler(func, args, kwargs or {})
            return around(handler, func, args, kwargs or {})
        except BaseException as error:
            shorten(error)
            raise

    @for_users  # type: ignore[arg-type] # it is called `self` in no Protocol
    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        return port.show(self, tensor_contents)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """As notebooks show it: what it prints, and in HTML above that where it is and what memory it has; fetched once for both.

        Raises:
            NotImplementedError: it cannot be shown. `repr`, which is asked next, raises the reason.
        """
        try:
            text = repr(self)
            return {"text/plain": text, "text/html": preformatted(text, _residence(self))}
        except Exception:
            raise NotImplementedError from None

    @for_users
    def __format__(self, spec: str) -> str:
        # `f"{loss:.3f}"`: PyTorch does this for its own class only.
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    @for_users
    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers; one round trip, none where the client knows them."""
        known = None if self.remote.storage.host is None else known_elements(self.remote)
        return self.detach().cpu().tolist() if known is None else known.tolist()

    @for_users
    def numpy(self, *, force: bool = False) -> Any:
        """As for every accelerator: only with `force`, which copies the elements to this machine.

        Raises:
            TypeError: without `force`.
        """
        if force:
            return self.detach().cpu().numpy(force=True)
        raise TypeError(
            f"can't convert a {self.device} tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    apply_ = _on_fetched(torch.Tensor.apply_)
    map_ = _on_fetched(torch.Tensor.map_)
    map2_ = _on_fetched(torch.Tensor.map2_)
    new = _on_own_index(torch.Tensor.new)
    new_tensor = _on_own_index(torch.Tensor.new_tensor)

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError(f"a {self.device} tensor has no memory on this machine to share: use Tensor.cpu() first")

    __dlpack_device__ = __dlpack__

    def untyped_storage(self) -> RemoteStorage:
        """Storage of the tensor; its bytes are on the executor."""
        return RemoteStorage.of_tensor(wrap(self.remote))

    def data_ptr(self) -> int:
        """A number that tells memory apart, as an address would: equal where two tensors begin at the same place.

        Nothing is behind it on this machine. 0 if there are no elements.
        """
        meta = self.remote.meta
        return address_of(self.remote.storage) + meta.offset * meta.dtype.itemsize if meta.numel else 0

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history; assigning makes this tensor stand for another's value."""
        return torch_private.get_data(self)

    @data.setter
    def data(self, source: torch.Tensor) -> None:
        if isinstance(source, LazyTensor):
            look_at(self, source.remote)
        else:
            torch_private.adopt_metadata(self, source)  # refuses, as it does for every other device

    @data.deleter
    def data(self) -> None:
        raise RuntimeError("Deleting tensor data is not allowed. Delete tensor instead!")

    def without_base(self) -> LazyTensor:
        """Return a tensor for the same value that autograd does not count as a view."""
        return wrap(self.remote)

    @for_users
    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        return copies.deep_copy(self, memo)

    @for_users
    def __reduce_ex__(self, protocol: Any) -> Any:
        return copies.reduce(self)

    def __coerce_same_metadata_as_tangent__(self, _metadata: Any, kind: type | None = None) -> LazyTensor | None:
        """AOTAutograd asks for a gradient of type `kind`: to what it has traced this is a plain tensor."""
        return self if kind is torch.Tensor else None

    @property
    def __tensor_flatten__(self) -> Any:
        """There only while `nn.Module.to` runs, which swaps subclasses that have it: Parameters and ties stay.

        At any other time it would tell libraries to look for inner tensors.
        """
        if not device_state.thread.converts_module:
            raise AttributeError("a LazyTensor has no inner tensors")
        return self.__tensor_unflatten__

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Any:
        """The counterpart of `__tensor_flatten__`."""
        raise NotImplementedError("a LazyTensor has no inner tensors")


def _residence(tensor: LazyTensor) -> str:
    """One line about a tensor's memory: its executor, and its bytes."""
    where = port.residence(tensor.remote.storage.id, tensor.remote.meta.device) if port.is_open() else "not sent yet"
    held, own = tensor.remote.storage.nbytes, tensor.nbytes
    memory = f"{size_text(held)} of memory" if own >= held else f"views {size_text(own)} of {size_text(held)} of memory"
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{tensor.device}: {where} · {kind}[{', '.join(map(str, tensor.shape))}] · {memory}"


def _overrides_ops(cls: type[torch.Tensor]) -> bool:
    """True for a library's class with a `__torch_dispatch__`. Fake tensors leave remote ones to us."""
    return not issubclass(cls, (LazyTensor, FakeTensor))


_make: Final = torch_private.make_wrapper_by_place
_STRIDED: Final = torch.strided


@functools.cache
def logical_device(index: int) -> torch.device:
    """`remote_accelerator:<index>`."""
    return torch.device(DEVICE_NAME, index)


def wrap(value: Value, cls: type[LazyTensor] = LazyTensor) -> LazyTensor:
    """A tensor that stands for `value`."""
    meta = value.meta
    device = logical_device(meta.device)
    tensor: LazyTensor = _make(cls, meta.shape, meta.stride, meta.offset or None, None, meta.dtype, _STRIDED, device)
    tensor.remote = value
    if meta.conj or meta.neg:
        torch_private.set_bits(tensor, meta.conj, meta.neg)
    return tensor


def fresh(meta: TensorMeta, storage: Storage) -> LazyTensor:
    """A tensor for a new value over `storage`."""
    return wrap(Value.begin(storage, meta))


def adopt(tensor: LazyTensor, meta: TensorMeta) -> None:
    """Give `tensor` other metadata, after an op that changed it in place."""
    tensor.remote.meta = meta
    look_at(tensor, tensor.remote)


def look_at(tensor: LazyTensor, value: Value) -> None:
    """From now on `tensor` stands for `value`."""
    meta = value.meta
    template = torch_private.make_wrapper(
        LazyTensor, meta.shape, meta.stride, meta.offset, meta.dtype, logical_device(meta.device)
    )
    template.remote = tensor.remote = value
    with torch_private.no_torch_functions():  # of classes that the user derived
        if tensor.is_conj() or tensor.is_neg():  # PyTorch takes metadata over only where these bits are the same
            torch_private.set_bits(tensor, conj=False, neg=False)
        torch_private.adopt_metadata(tensor, template)
        if meta.conj or meta.neg:
            torch_private.set_bits(tensor, meta.conj, meta.neg)


if native.ON:
    from djinn_core.interception.native import values as native_values

    LazyTensor = native_values.NativeTensor  # type: ignore[misc]
    adopt, fresh = native_values.adopt, native_values.fresh  # type: ignore[assignment]
    look_at, wrap = native_values.look_at, native_values.wrap  # type: ignore[assignment]
