"""Registers the device with PyTorch: the one side effect of importing Djinn."""

from __future__ import annotations

import torch

from djinn_client.interception.device import numeric_settings, processes
from djinn_client.interception.device.device_module import bound_state, make_module
from djinn_client.interception.dispatch import record
from djinn_client.interception.libraries.install import install as adapt_libraries
from djinn_client.interception.libraries.on_import import call_on_import
from djinn_client.interception.native.install import install_device, register_device_module
from djinn_client.interception.ops import alerts as _alerts  # noqa: F401 - its handlers
from djinn_client.interception.ops import canonicalize as _normalise  # noqa: F401 - its handlers
from djinn_client.interception.ops import collectives, cuda_decompositions, higher_order, layouts
from djinn_client.interception.ops import evaluation as _evaluation  # noqa: F401 - its handlers
from djinn_client.interception.ops.backward import guard_engine
from djinn_client.interception.ops.padding import pad_with_zeros
from djinn_client.interception.recording.module_calls import follow_modules
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors import async_cpu_tensor, batched_fetch, host_values
from djinn_client.interception.tensors.modules import fetch_modules_together
from djinn_client.interception.tensors.notebook_tensors import show_in_notebooks
from djinn_client.torch_dispatch import wrap_engine, wrap_module_apply, wrap_module_call
from djinn_client.torch_tracing import spare_dtensor, spare_dynamo


def install() -> None:
    """Make `remote_accelerator` a device of this process; calling it again does nothing."""
    if port.dispatch_layout is layouts.dispatch_layout:
        return
    port.record, port.bound_state = record, bound_state
    port.dispatch_layout = layouts.dispatch_layout
    port.copy_later, port.copy_into_later = async_cpu_tensor.copy_later, async_cpu_tensor.copy_into_later
    _register()
    adapt_libraries()
    show_in_notebooks()


def _register() -> None:
    """Register the device in C++, and what Python adds to it."""
    register_device_module(make_module())
    install_device()
    layouts.register()
    cuda_decompositions.register()
    higher_order.register()
    collectives.register()
    torch.Tensor.tolist = host_values.tolist(torch.Tensor.tolist)  # type: ignore[method-assign, assignment]
    batched_fetch.fetch_saved_together()
    wrap_module_apply(fetch_modules_together)
    processes.share_nothing()
    numeric_settings.install()
    wrap_engine(guard_engine)
    wrap_module_call(follow_modules)
    torch.nn.TransformerEncoder.forward = pad_with_zeros(torch.nn.TransformerEncoder.forward)  # type: ignore[method-assign]
    spare_dtensor(call_on_import)
    spare_dynamo(call_on_import)
