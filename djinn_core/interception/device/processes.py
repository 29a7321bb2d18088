"""Other processes: each has a session of its own, so remote memory is not shared with them."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import NoReturn

from djinn_core.errors import UnsupportedOperation
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, device_type


def _refuse(tensor: LazyTensor) -> NoReturn:
    raise UnsupportedOperation(
        f"a tensor on {tensor.device} cannot be handed to another process, which has a session of its own and would not "
        f"share its memory. Send tensor.cpu(), and move it to {device_type()} there"
    )


def share_nothing() -> None:
    """Refuse remote tensors among what `multiprocessing` sends to other processes, where PyTorch would share memory.

    `torch.save`, `copy` and other users of pickle go by way of the CPU, as ever.
    """
    ForkingPickler.register(LazyTensor, _refuse)
