"""PyTorch's device type `cuda` as a name of the remote device, with its guard and its kernels."""

from __future__ import annotations

from djinn_client import torch_dispatch
from djinn_client.interception.native.generators import Generator
from djinn_client.interception.native.library import ops
from djinn_client.interception.native.streams import show_names
from djinn_client.interception.ops import factories
from djinn_client.interception.tensors import lazy_tensor


def go_by_cuda() -> None:
    """From now on what is made on `cuda`, or moved there, is remote."""
    ops.cuda_is_remote()
    factories.handle_at("CUDA")
    lazy_tensor.go_by("cuda")
    show_names()
    torch_dispatch.replace_classes(Generator=Generator)
