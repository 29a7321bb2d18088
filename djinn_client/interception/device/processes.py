"""Remote tensors and other processes: each process has its own session, so processes do not share remote memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, NoReturn

import torch
from torch.multiprocessing.reductions import reduce_storage

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.on_import import adapt_on_import, rebind
from djinn_client.interception.tensors.lazy_tensor import device_type, is_remote
from djinn_core.errors import UnsupportedOperation

_QUEUE: Final[Any] = Queue  # PyTorch has no public way to tell how a queue handles errors


def _refuse_remote(storage: torch.UntypedStorage) -> tuple[Callable[[str], NoReturn], tuple[str]]:
    message = (
        f"a tensor on {storage.device} cannot be sent to another process, because each process has its own session and "
        f"remote memory is not shared. Send tensor.cpu(), and move it to {device_type()} in the other process"
    )
    if _is_only_printed():
        return _raise_refusal, (message,)
    raise UnsupportedOperation(message)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """Share a storage as PyTorch does. Refuse remote storages."""
    return _refuse_remote(storage) if is_remote(storage.device) else reduce_storage(storage)


def _is_only_printed() -> bool:
    """Return True in the feeder thread of a `multiprocessing.Queue`.

    That thread only prints pickling errors, so the receiver would wait forever. Queues with an error handler, such as those of
    `concurrent.futures`, report the error to the sender.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _QUEUE._feed.__code__:  # noqa: SLF001
        frame = frame.f_back
    return frame is not None and frame.f_locals["onerror"] is _QUEUE._on_queue_feeder_error  # noqa: SLF001


def _raise_refusal(message: str) -> NoReturn:
    """Raise the pickling error in the process that unpickles the tensor."""
    raise UnsupportedOperation(message)


def refuse_sharing() -> None:
    """Make `multiprocessing` refuse to send remote tensors, for which PyTorch would share memory.

    `torch.save`, `copy` and other users of pickle still copy by way of the CPU.
    """
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)


class _MeshName(str):
    """A device name whose `isalpha` is True, although the name contains an underscore."""

    __slots__ = ()

    def isalpha(self) -> bool:
        return True


def accept_name_in_meshes() -> None:
    """Make `init_device_mesh` accept the device's name.

    PyTorch reads a name that is not alphabetic as a name with an index.
    """
    adapt_on_import({"torch.distributed.device_mesh": _adapt_device_mesh})


def _adapt_device_mesh(module: Any) -> None:
    plain = module.init_device_mesh

    @functools.wraps(plain)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return plain(_MeshName(device_type) if device_type == DEVICE_NAME else device_type, *args, **kwargs)

    rebind(plain, init_device_mesh, ("torch.distributed", "torch.testing"))
