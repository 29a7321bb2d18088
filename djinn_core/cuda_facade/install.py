"""Everything that makes `cuda` the name of the remote device, in order."""

from __future__ import annotations

from djinn_core.cuda_facade import (
    autocast,
    backend,
    backends,
    legacy,
    module,
    parallel,
    pinning,
    profiling,
    tensors,
    tracing,
)
from djinn_core.cuda_facade.spawning import call_in_new_processes


class _Installed:
    done = False


def install() -> None:
    """From now on, and in the processes that this one spawns, `cuda` is the remote device; once.

    Raises:
        StartupError: this PyTorch is not laid out as expected.
    """
    if _Installed.done:
        return
    import djinn  # noqa: F401 - registers the remote device

    backend.register()
    tensors.rename()
    autocast.rename()
    module.replace()
    backends.replace()
    legacy.replace()
    parallel.replace()
    pinning.replace()
    profiling.replace()
    tracing.replace()
    call_in_new_processes(install)
    _Installed.done = True
