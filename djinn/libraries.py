"""For plugins that tell a library of the device: changing its modules when they are imported, and what the changes need."""

from __future__ import annotations

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.libraries.on_import import adapt_on_import, rebind
from djinn_client.interception.libraries.only_accelerator import is_the_only_accelerator
from djinn_client.interception.libraries.random_state_files import loading_random_state, saving_random_state
from djinn_client.interception.tensors.batched_fetch import fetched_together
from djinn_client.interception.tensors.lazy_tensor import device_type, is_remote, logical_device
from djinn_client.runtime.integrations import is_disabled
from djinn_client.torch_objects import forward_hooks
from djinn_core.logs import get_logger

__all__ = [
    "DEVICE_NAME",
    "adapt_on_import",
    "device_type",
    "fetched_together",
    "forward_hooks",
    "get_logger",
    "is_disabled",
    "is_remote",
    "is_the_only_accelerator",
    "loading_random_state",
    "logical_device",
    "rebind",
    "saving_random_state",
]
