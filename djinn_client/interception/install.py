"""Register the device with PyTorch: the only side effect of importing Djinn."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import torch

from djinn_client.interception.device import numeric_settings, processes
from djinn_client.interception.device.device_module import make_module
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.native.generators import Generator
from djinn_client.interception.native.install import install_device, register_device_module
from djinn_client.interception.native.library import ops
from djinn_client.interception.native.streams import install_named_streams
from djinn_client.interception.on_import import call_on_import
from djinn_client.interception.ops import op_handlers, rewrites
from djinn_client.interception.recording.module_calls import follow_modules, guard_engine
from djinn_client.interception.sync import tolist
from djinn_client.interception.tensors import async_cpu_tensor, batched_fetch, lazy_tensor
from djinn_client.interception.tensors.batched_fetch import fetch_modules_together
from djinn_client.interception.tensors.printing import print_fetched, show_in_notebooks
from djinn_client.torch_dispatch import replace_classes, wrap_engine, wrap_module_apply, wrap_module_call
from djinn_client.torch_tracing import spare_dynamo
from djinn_core.errors import install_hint
from djinn_core.logs import get_logger

_log = get_logger("djinn.interception")


def install() -> None:
    """Register `remote_accelerator` in this process. Further calls do nothing."""
    if device_state.copy_later is async_cpu_tensor.copy_later:
        return
    device_state.copy_later, device_state.copy_into_later = (
        async_cpu_tensor.copy_later,
        async_cpu_tensor.copy_into_later,
    )
    _register()
    print_fetched()
    show_in_notebooks()
    call_on_import("torch._inductor.compile_fx", _name_package)


def _name_package(_: Any) -> None:
    """Warn before `torch.compile` fails with `KeyError: 'remote_accelerator'`, if no installed package compiles for the device."""
    if "eager" in entry_points(group="djinn.integrations.torch._dynamo").names:
        return
    _log.warning(
        "torch.compile cannot compile functions with remote tensors. The package in plugins/integrations runs them eagerly, "
        "and has the backend 'djinn': run " + install_hint("plugins/integrations")
    )


def rename_to_cuda() -> None:
    """Make `cuda` a name of the remote device in PyTorch, including its guard and kernels."""
    ops.cuda_is_remote()
    lazy_tensor.set_shown_name("cuda")
    install_named_streams()
    replace_classes(Generator=Generator)


def _register() -> None:
    """Register the device in C++, then its Python parts."""
    register_device_module(make_module())
    install_device()
    op_handlers.register()
    rewrites.register()
    torch.Tensor.tolist = tolist(torch.Tensor.tolist)  # type: ignore[method-assign, assignment]
    batched_fetch.fetch_saved_together()
    wrap_module_apply(fetch_modules_together)
    processes.refuse_sharing()
    processes.accept_name_in_meshes()
    numeric_settings.install()
    wrap_engine(guard_engine)
    wrap_module_call(follow_modules)
    torch.nn.TransformerEncoder.forward = rewrites.pad_with_zeros(torch.nn.TransformerEncoder.forward)  # type: ignore[method-assign]
    spare_dynamo(call_on_import)
