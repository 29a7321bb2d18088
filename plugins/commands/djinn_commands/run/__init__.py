"""`djinn run`: run scripts written for CUDA, with `cuda` as the name of the remote device.

This module is imported for `djinn --help`, so the other modules are imported when they are needed.

`cuda` is a device type that PyTorch knows in every build. Without a GPU it has neither a guard nor working kernels.
`rename_to_cuda` in `djinn_client/interception/install.py` gives it the guard and kernels of the remote device, so
tensors that PyTorch creates on `cuda` are remote. PyTorch's C++ keeps the remote device's own name for them.

- `run_command`: the command line. `cuda_names`: makes `cuda` the remote device, in this process and in processes that
  the script spawns.
- `cuda_tensors`: tensors, generators, streams and events report `cuda`. `cuda_module`: the functions of `torch.cuda`.
- `cuda_subsystems`: autocasting, `torch.compile`, `DataParallel`, process groups and profilers.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
import pluggy

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")


@hookimpl
def djinn_register_commands() -> Iterable[click.Command]:
    """Return the command `run`."""
    from djinn_commands.run.run_command import run

    return [run]
