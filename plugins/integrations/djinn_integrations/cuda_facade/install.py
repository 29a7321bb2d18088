"""Everything that makes `cuda` the name of the remote device, in order."""

from __future__ import annotations

from typing import Any

from djinn.cuda_name import go_by_cuda
from djinn_integrations.cuda_facade import (
    autocast,
    backends,
    legacy,
    module,
    parallel,
    pinning,
    profiling,
    tensors,
    tracing,
)


def install(torch: Any) -> None:
    """From now on `cuda` is the remote device.

    Raises:
        StartupError: this PyTorch is not laid out as expected.
    """
    del torch  # what changes it imports it
    go_by_cuda()
    tensors.rename()
    autocast.rename()
    module.replace()
    backends.replace()
    legacy.replace()
    parallel.replace()
    pinning.replace()
    profiling.replace()
    tracing.replace()
