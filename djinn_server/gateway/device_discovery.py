"""Discovery of the devices that `djinn serve --device all` offers.

Device plugins are queried in a separate process: the query opens some devices, and the gateway should hold none of their memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from djinn_core.errors import StartupError
from djinn_core.registry.selection import Selection
from djinn_server.devices import FALLBACK
from djinn_server.launch.command import executor_environment

ALL = "all"


def offered(devices: Sequence[str], plugins: Selection, timeout: float) -> list[str]:
    """`devices` with `all` replaced by every device that device plugins report; CPUs only where there is nothing else.

    Raises:
        StartupError: the device plugins cannot be asked.
    """
    if ALL not in devices:
        return list(devices)
    present = _ask(plugins, timeout)
    others = [device for device in present if device.partition(":")[0] != FALLBACK]
    named = [device for device in devices if device != ALL]
    return [*named, *(device for device in others or present if device not in named)]


def _ask(plugins: Selection, timeout: float) -> list[str]:
    command = [sys.executable, "-P", "-m", __name__]
    order = msgspec.json.encode(plugins.sendable())  # not in the arguments: settings may be secrets
    try:
        found = subprocess.run(
            command, input=order, env=executor_environment(), stdout=subprocess.PIPE, timeout=timeout, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StartupError(f"cannot find out which devices there are: {error}. Name them with --device") from error
    return [str(device) for device in json.loads(found.stdout.splitlines()[-1])]


def main() -> None:
    """Print the ids of the devices that device plugins report, as JSON."""
    from djinn_core.registry.builtin_plugins import builtin_plugins
    from djinn_core.registry.registry import load_registry
    from djinn_core.system.role import become_server

    become_server("executor")
    selection = msgspec.json.decode(sys.stdin.buffer.read(), type=Selection)
    registry = load_registry(selection, builtins=builtin_plugins(), kinds={"devices"}, started=True)
    offered = [device for device in registry.devices if not device.chosen_by_name]
    found = [capabilities.id for device in offered for capabilities in device.discover()]
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
