"""Everything that makes `cuda` the name of the remote device, in order."""

from __future__ import annotations

import torch

from djinn_client.cuda_facade import (
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
from djinn_client.interception.device.cuda_name import go_by_cuda
from djinn_core.errors import DjinnError, StartupError


def install() -> None:
    """Make `cuda` the remote device in this process.

    Raises:
        StartupError: this version of PyTorch lacks what the facade replaces.
    """
    try:
        _replace()
    except DjinnError:
        raise
    except Exception as error:
        raise StartupError(
            f"`djinn run` cannot make `cuda` the remote device with PyTorch {torch.__version__}: {type(error).__name__}: {error}. "
            "docs/platforms.md lists the versions that are supported"
        ) from error


def _replace() -> None:
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
