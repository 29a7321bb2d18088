"""Registers the device with PyTorch: the one side effect of importing Djinn."""

from __future__ import annotations

import torch

from djinn_core.interception.device import accelerator, numeric_settings, processes, random_forks
from djinn_core.interception.device.device_module import bound_state, make_module
from djinn_core.interception.device.device_state import DEVICE_NAME, device_state
from djinn_core.interception.device.generators import Generator
from djinn_core.interception.device.streams import Event, Stream
from djinn_core.interception.dispatch import dispatch, forget_calls, record
from djinn_core.interception.libraries.install import install as adapt_libraries
from djinn_core.interception.libraries.on_import import call_on_import
from djinn_core.interception.native import library as native
from djinn_core.interception.ops import alerts as _alerts  # noqa: F401 - its handlers
from djinn_core.interception.ops import (
    attention,
    autocast,
    collectives,
    cuda_decompositions,
    factories,
    higher_order,
    inplace_views,
    layouts,
    undispatched_views,
)
from djinn_core.interception.ops import canonicalize as _normalise  # noqa: F401 - its handlers
from djinn_core.interception.ops import evaluation as _evaluation  # noqa: F401 - its handlers
from djinn_core.interception.ops.backward import guard_engine
from djinn_core.interception.ops.composite import register_whole
from djinn_core.interception.ops.default_dtype import noting_changes
from djinn_core.interception.ops.padding import pad_with_zeros
from djinn_core.interception.recording.module_calls import follow_modules
from djinn_core.interception.runtime_interface import port
from djinn_core.interception.sync import show
from djinn_core.interception.tensors import (
    async_cpu_tensor,
    batched_fetch,
    lazy_clones,
    lazy_tensor,
    loading,
    pinning,
    storage_methods,
    subclasses,
)
from djinn_core.interception.tensors.modules import fetch_modules_together, keep_parameters, swap_in_conversions
from djinn_core.torch_objects import wrap_set_default_dtype, wrap_swap_tensors
from djinn_core.torch_private import (
    register_backend,
    replace_accelerator_functions,
    replace_classes,
    spare_dispatch_rules,
    take_in_lists,
    wrap_engine,
    wrap_module_apply,
    wrap_module_call,
)
from djinn_core.torch_tracing import spare_dtensor, spare_dynamo
from djinn_core.tracebacks import for_users


def install() -> None:
    """Make `remote_accelerator` a device of this process; calling it again does nothing."""
    libraries = device_state.libraries
    if libraries:
        return
    port.record, port.show, port.bound_state = record, show, bound_state
    port.dispatch_layout = layouts.dispatch_layout
    port.copy_later, port.copy_into_later = async_cpu_tensor.copy_later, async_cpu_tensor.copy_into_later
    if native.ON:
        install_native(libraries)
    else:
        _install_python(libraries)
    adapt_libraries()


def install_native(libraries: list[torch.library.Library]) -> None:
    """Register the device in C++, and what Python adds to it."""
    from djinn_core.interception.native.install import install_device, register_device_module

    register_device_module(make_module())
    libraries.extend([*layouts.register(), cuda_decompositions.register()])
    install_device()
    higher_order.register()
    collectives.register()
    lazy_clones.register()
    lazy_tensor.replace_methods()
    batched_fetch.fetch_saved_together()
    wrap_module_apply(fetch_modules_together)
    processes.share_nothing()
    random_forks.install()
    numeric_settings.install()
    wrap_engine(guard_engine)
    wrap_module_call(follow_modules)
    torch.nn.TransformerEncoder.forward = pad_with_zeros(torch.nn.TransformerEncoder.forward)  # type: ignore[method-assign]
    spare_dtensor(call_on_import)
    spare_dynamo(call_on_import)


def _install_python(libraries: list[torch.library.Library]) -> None:
    register_backend(DEVICE_NAME, make_module())
    libraries.extend(
        [
            factories.register(),
            pinning.register(),
            undispatched_views.register(),
            inplace_views.register(),
            *layouts.register(),
        ]
    )
    libraries.extend([register_whole(dispatch), attention.register(), cuda_decompositions.register()])
    libraries.extend(autocast.register())
    higher_order.register()
    collectives.register()
    replace_classes(Generator=Generator, Stream=Stream, Event=Event)
    take_in_lists(lazy_tensor.LazyTensor)
    replace_accelerator_functions(**{name: for_users(made) for name, made in accelerator.FUNCTIONS.items()})
    loading.register()
    lazy_clones.register()
    subclasses.register()
    storage_methods.install()
    batched_fetch.fetch_saved_together()
    processes.share_nothing()
    random_forks.install()
    numeric_settings.install()
    wrap_engine(guard_engine)
    wrap_module_apply(keep_parameters)
    wrap_swap_tensors(swap_in_conversions)
    wrap_set_default_dtype(noting_changes(forget_calls))
    wrap_module_call(follow_modules)
    torch.nn.TransformerEncoder.forward = pad_with_zeros(torch.nn.TransformerEncoder.forward)  # type: ignore[method-assign]
    spare_dispatch_rules(lazy_tensor.LazyTensor)
    spare_dtensor(call_on_import)
    spare_dynamo(call_on_import)
