"""Verification of a program's ops: `djinn.verify()`.

- `verifying`: the block and its report. `differences`: how far two results are apart. `cpu_copies`: copies of the device's memory.
"""

from __future__ import annotations

from djinn.hooks import ApiName, hookimpl

djinn_api_version = "2.0"


@hookimpl
def djinn_register_api_names() -> list[ApiName]:
    """The names of `djinn` that this package brings."""
    return [
        ApiName("Verification", "djinn_profiler.verification.verifying"),
        ApiName("verify", "djinn_profiler.verification.verifying"),
    ]
