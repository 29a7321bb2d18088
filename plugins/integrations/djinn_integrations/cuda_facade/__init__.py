"""The name `cuda` for the remote device, in a process that `djinn run` started.

No script is rewritten and no call is searched for strings. `cuda` is a device type that PyTorch knows in every build; where
there is no GPU it has neither a guard nor kernels that work. Here it gets those of the remote device (`djinn.cuda_name`): what
asks PyTorch for memory on `cuda` gets remote tensors. Those say that they are on `cuda` (`tensors`), autocasting for `cuda` is
that of the remote device (`autocast`), and the functions of `torch.cuda` are those of `torch.remote_accelerator`
(`module`). PyTorch's C++ knows the tensors by the remote device's own name all the time, so whatever works there works
here, with builds of PyTorch for CUDA and without.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from djinn.hooks import Integration, hookimpl
from djinn.libraries import Adapter

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """The change of PyTorch, in programs of `djinn run`."""
    return [Adapter("torch", _install, only_under_run=True)]


def _install(torch: Any) -> None:
    from djinn_integrations.cuda_facade.install import install  # here, because programs of their own need none of it

    install(torch)
