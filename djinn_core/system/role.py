"""Process role: client, gateway or executor. Servers never register `remote_accelerator`, though plugins import `djinn`.

Once the device is registered, `pin_memory()` and `torch.accelerator` mean ours, and executors hold the real ones.
"""

from __future__ import annotations

from typing import Literal

Role = Literal["client", "gateway", "executor"]
_role: Role = "client"


def become_server(role: Literal["gateway", "executor"]) -> None:
    """Say that this process serves clients, before anything imports `djinn`."""
    global _role
    _role = role


def is_client() -> bool:
    """True if importing `djinn` registers the device in this process."""
    return _role == "client"
