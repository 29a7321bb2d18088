"""PyTorch's device type `cuda` as a name of the remote device, with its guard and its kernels."""

from __future__ import annotations

import warnings

import torch

from djinn_core import torch_private
from djinn_core.errors import StartupError
from djinn_core.interception.device.device_state import DEVICE_NAME, device_state
from djinn_core.interception.native import library as native
from djinn_core.interception.ops import factories
from djinn_core.interception.tensors import lazy_tensor


def go_by_cuda() -> None:
    """From now on what is made on `cuda`, or moved there, is remote.

    Raises:
        StartupError: this PyTorch is not laid out as expected.
    """
    try:
        torch_private.stand_in_for_cuda()
    except (OSError, ValueError) as error:
        raise StartupError(
            f"`djinn run` does not know PyTorch {torch.__version__}: {error}. Let the script use the device "
            f"'{DEVICE_NAME}:0' instead"
        ) from error
    with warnings.catch_warnings():
        # Builds of PyTorch for CUDA have kernels there, which find no GPU.
        warnings.filterwarnings(
            "ignore", category=UserWarning, message="(?s).*Overriding a previously registered kernel"
        )
        device_state.libraries.append(factories.register("CUDA"))
    lazy_tensor.go_by("cuda")
    if native.ON:
        from djinn_core.interception.native.generators import Generator
        from djinn_core.interception.native.streams import show_names

        show_names()
        torch_private.replace_classes(Generator=Generator)
