"""Other processes: each has a session of its own, so remote memory is not shared with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import NoReturn

from djinn_core.errors import UnsupportedOperation
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, device_type

_FEEDER = (
    "QueueFeederThread"  # of `multiprocessing.Queue`: it prints pickling errors, and the receiver would wait forever
)


def _refuse(tensor: LazyTensor) -> tuple[Callable[[str], NoReturn], tuple[str]]:
    message = (
        f"a tensor on {tensor.device} cannot be handed to another process, which has a session of its own and would not "
        f"share its memory. Send tensor.cpu(), and move it to {device_type()} there"
    )
    if threading.current_thread().name != _FEEDER:
        raise UnsupportedOperation(message)
    return _refused, (message,)


def _refused(message: str) -> NoReturn:
    """Raise the error in the process that unpickles the tensor."""
    raise UnsupportedOperation(message)


def share_nothing() -> None:
    """Refuse remote tensors among what `multiprocessing` sends to other processes, where PyTorch would share memory.

    `torch.save`, `copy` and other users of pickle go by way of the CPU, as ever.
    """
    ForkingPickler.register(LazyTensor, _refuse)
