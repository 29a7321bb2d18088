"""For what lets a program call the remote device `cuda`: PyTorch's device type, and the parts of the device that show a name."""

from __future__ import annotations

from djinn_client.interception.device.cuda_name import go_by_cuda
from djinn_client.interception.device.current_device import current_device, set_current_device
from djinn_client.interception.device.properties import get_device_properties
from djinn_client.interception.native.generators import NativeGenerator as RemoteGenerator
from djinn_client.interception.native.streams import NamedEvent as RemoteEvent
from djinn_client.interception.native.streams import NamedStream as RemoteStream
from djinn_client.torch_dispatch import pass_for

__all__ = [
    "RemoteEvent",
    "RemoteGenerator",
    "RemoteStream",
    "current_device",
    "get_device_properties",
    "go_by_cuda",
    "pass_for",
    "set_current_device",
]
