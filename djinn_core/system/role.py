"""Process role: client, gateway or executor.

Servers never register `remote_accelerator`, although plugins import `djinn`.

After registration, `pin_memory()` and `torch.accelerator` refer to Djinn's device, but executors need the real
device.
"""

from __future__ import annotations

from typing import Literal

Role = Literal["client", "gateway", "executor"]
_role: Role = "client"


def become_server(role: Literal["gateway", "executor"]) -> None:
    """Mark this process as a server, before anything imports `djinn`."""
    global _role
    _role = role


def is_client() -> bool:
    """Return True if importing `djinn` registers the device in this process."""
    return _role == "client"
