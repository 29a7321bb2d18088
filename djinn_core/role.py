"""What this process is. Executors must not register `remote_accelerator`, although their plugins import `djinn`.

Once the device is registered, `pin_memory()` and `torch.accelerator` mean ours, and executors hold the real ones.
"""

from __future__ import annotations

_executor = False


def become_executor() -> None:
    """Say that this process is an executor, before anything imports `djinn`."""
    global _executor
    _executor = True


def is_executor() -> bool:
    """Whether this process is an executor."""
    return _executor
