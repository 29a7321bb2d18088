"""Batched fetch: a program that reads values one after the other gets them in one round trip: `module.cpu()`, `torch.save`.

The first fetch requests all values of its dtype, in groups, and waits for its own group only. A value that is written
meanwhile is fetched again by itself. A value that could not be computed is also fetched by itself, so that its error is
raised when the program reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Final, NoReturn

import msgspec
import torch

from djinn_client import torch_dispatch
from djinn_client.interception.async_fetch import Pending, fetch_later
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote, wrap
from djinn_client.interception.tensors.storage import Storage, Value
from djinn_client.torch_dispatch import ModuleApply
from djinn_client.tracebacks import shorten_through
from djinn_core.errors import RemoteError
from djinn_core.wire.limits import BUFFERS

_PRIORITY: Final = 15  # priority of `_note_storage`, before PyTorch's rule for names of such devices
GROUP_BYTES: Final = 32 << 20  # bytes of one reply; a larger tensor gets its own reply


class _RequestedValue(msgspec.Struct, frozen=True):
    """A requested value.

    Attributes:
        pending: the future of the reply.
        index: position of the value in the reply.
        storage: storage of the value.
        version: version of the storage at the request.
    """

    pending: Pending
    index: int
    storage: Storage
    version: int

    def take(self) -> torch.Tensor | None:
        """Return the elements, or None if the value was written since the request, or could not be computed."""
        if self.version < 0 or self.storage.version != self.version:
            return None
        try:
            return self.pending.result()[self.index]
        except RemoteError:
            return None


class BatchedFetch:
    """Prediction that the program will fetch the values in `upcoming`, by key.

    `upcoming` is called once, at the first fetch.
    """

    def __init__(
        self, upcoming: Callable[[], dict[int, Value]], uploads: Callable[[], list[torch.Tensor]] = list
    ) -> None:
        """Predict the values that `upcoming` returns.

        `uploads`: returns the CPU tensors that the program will upload next, in order.
        """
        self._upcoming = upcoming
        self._uploads: Callable[[], list[torch.Tensor]] | None = uploads
        self._unrequested: dict[int, Value] | None = None
        self._requested: dict[int, _RequestedValue] = {}

    def take(self, key: int) -> torch.Tensor | None:
        """Return the elements of the value `key`, or None if it was not predicted or must be fetched by itself."""
        if key not in self._requested:
            self._fetch_batch(key)
        requested = self._requested.pop(key, None)
        return None if requested is None else requested.take()

    def to_upload(self) -> list[torch.Tensor]:
        """Return the CPU tensors that will be uploaded next. Later calls return an empty list."""
        uploads, self._uploads = self._uploads, None
        return uploads() if uploads is not None else []

    @property
    def has_announced_uploads(self) -> bool:
        """Return True if `to_upload` was called."""
        return self._uploads is None

    def note_access(self, storage: Any) -> None:
        """Do nothing: the upcoming values are known."""

    def _fetch_batch(self, key: int) -> None:
        """Request the value `key`, and all unrequested values of its dtype. Do nothing if no fetch of `key` was predicted."""
        if self._unrequested is None:
            self._unrequested = self._upcoming()
        remaining = self._unrequested
        request = remaining.get(key)
        if request is None:
            return
        alike = {
            k: v for k, v in remaining.items() if v.meta.dtype == request.meta.dtype and v.meta.nbytes <= GROUP_BYTES
        }
        self._unrequested = {k: v for k, v in remaining.items() if k not in alike}
        for group in _groups(alike):
            versions = [value.storage.version for _, value in group]
            pending = fetch_later([wrap(value) for _, value in group])
            for index, ((number, value), version) in enumerate(zip(group, versions, strict=True)):
                self._requested[number] = _RequestedValue(pending, index, value.storage, version)


class SavedStorages(BatchedFetch):
    """Batched fetch of the storages that PyTorch has accessed, each as one tensor of bytes."""

    def __init__(self) -> None:
        super().__init__(self._as_bytes)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def note_access(self, storage: Any) -> None:
        """Record that PyTorch accessed a remote storage, which may be fetched as a whole."""
        if storage.nbytes():
            self._storages[storage._cdata] = storage  # noqa: SLF001 - the storage itself, of which there may be several objects

    def _as_bytes(self) -> dict[int, Value]:
        return by_handle(
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in self._storages.values()
        )


def _groups(values: Mapping[int, Value]) -> Iterator[list[tuple[int, Value]]]:
    group: list[tuple[int, Value]] = []
    size = 0
    for key, value in values.items():
        if group and (size + value.meta.nbytes > GROUP_BYTES or len(group) == BUFFERS):
            yield group
            group, size = [], 0
        group.append((key, value))
        size += value.meta.nbytes
    if group:
        yield group


@contextmanager
def expecting(prediction: BatchedFetch) -> Iterator[None]:
    """Context manager in which `prediction` predicts this thread's fetches, unless an enclosing block predicts them."""
    thread = device_state.thread
    outer = thread.predicted_fetches
    thread.predicted_fetches = outer or prediction
    try:
        yield
    finally:
        thread.predicted_fetches = outer
        if outer is None and prediction.has_announced_uploads and port.is_open():
            port.sink.expect([])


def fetched_together(tensors: Iterable[Any]) -> AbstractContextManager[None]:
    """Return a context manager in which the first read of one of the remote `tensors` fetches all of them together."""
    return expecting(BatchedFetch(lambda: by_handle(tensors)))


def tensors_of(module: torch.nn.Module) -> dict[int, Value]:
    """Return the remote parameters of `module`, their gradients and the buffers, by the handles of their values."""
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if isinstance(p, LazyTensor)]
    return by_handle(chain(parameters, gradients, module.buffers()))


def cpu_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of `module` that are strided CPU tensors, not sparse."""
    tensors = chain(module.parameters(), module.buffers())
    return [t for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]


def by_handle(tensors: Iterable[Any]) -> dict[int, Value]:
    """Return the remote tensors in `tensors`, by the handles of their values."""
    return {t.remote.handle: t.remote for t in tensors if isinstance(t, LazyTensor)}


def _note_storage(storage: Any) -> None:
    """Record that PyTorch accessed a storage. `torch.save` calls this for each storage, to ask for its device name."""
    prediction = device_state.thread.predicted_fetches
    if prediction is not None and is_remote(storage.device):
        prediction.note_access(storage)


def fetch_saved_together() -> None:
    """Make `torch.save` fetch all storages together, although it writes them one by one."""
    save = torch.serialization.save
    torch.serialization.register_package(_PRIORITY, _note_storage, lambda _storage, _location: None)

    @functools.wraps(save)
    def saved(*args: Any, **kwargs: Any) -> Any:
        with expecting(SavedStorages()):
            return save(*args, **kwargs)

    torch.save = torch.serialization.save = saved


def fetch_modules_together(apply: ModuleApply) -> ModuleApply:
    """Wrap `Module._apply` so that its fetches and uploads share round trips.

    PyTorch converts the parameters, as for every accelerator.
    """

    @functools.wraps(apply)
    def applied(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        thread = device_state.thread
        if thread.converts_module:  # the outer module
            return apply(module, fn, *args, **kwargs)
        thread.converts_module = True
        try:
            with expecting(BatchedFetch(lambda: tensors_of(module), lambda: cpu_tensors(module))):
                return apply(module, functools.partial(_converted, fn), *args, **kwargs)
        except BaseException as error:
            shorten_through(error)
            raise
        finally:
            thread.converts_module = False

    return applied


def _converted(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return `fn(tensor)`. If its device or dtype differs, autograd graphs that contain `tensor` become unusable."""
    result = fn(tensor)
    if (isinstance(tensor, LazyTensor) or isinstance(result, LazyTensor)) and (result.device, result.dtype) != (
        tensor.device,
        tensor.dtype,
    ):
        torch_dispatch.poison_gradient_node(tensor, _raise_converted)
    return result


def _raise_converted(_: Any) -> NoReturn:
    raise RuntimeError(
        "backward reached a parameter that was moved or converted after the forward pass: call .to() before the forward "
        "pass, or after both"
    )
