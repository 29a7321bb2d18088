"""Which devices `djinn serve --device all` offers.

Device plugins are asked in a process of its own: asking opens some devices, and the gateway should hold none of their memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence

from djinn_core.errors import StartupError
from djinn_core.launch.command import executor_environment
from djinn_core.server.devices import FALLBACK

ALL = "all"


def offered(devices: Sequence[str], plugins: Sequence[str] | None, disable: Iterable[str], timeout: float) -> list[str]:
    """`devices` with `all` replaced by every device that device plugins report; CPUs only where there is nothing else.

    Raises:
        StartupError: the device plugins cannot be asked.
    """
    if ALL not in devices:
        return list(devices)
    present = _ask(plugins, disable, timeout)
    others = [device for device in present if device.partition(":")[0] != FALLBACK]
    named = [device for device in devices if device != ALL]
    return [*named, *(device for device in others or present if device not in named)]


def _ask(plugins: Sequence[str] | None, disable: Iterable[str], timeout: float) -> list[str]:
    selection = json.dumps({"plugins": plugins, "disable": sorted(disable)})
    command = [sys.executable, "-P", "-m", __name__, selection]
    try:
        answer = subprocess.run(
            command, env=executor_environment(), stdout=subprocess.PIPE, timeout=timeout, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StartupError(f"cannot find out which devices there are: {error}. Name them with --device") from error
    return [str(device) for device in json.loads(answer.stdout.splitlines()[-1])]


def main() -> None:
    """Print the ids of the devices that device plugins report, as JSON."""
    from djinn_core.builtins import builtin_plugins
    from djinn_core.plugins.registry import Selection, load_where_started
    from djinn_core.role import become_server

    become_server("executor")
    chosen = json.loads(sys.argv[1])
    names = None if chosen["plugins"] is None else tuple(chosen["plugins"])
    selection = Selection(names, frozenset(chosen["disable"]))
    registry = load_where_started(selection, builtins=builtin_plugins(), kinds={"devices"})
    found = [capabilities.id for device in registry.devices for capabilities in device.discover()]
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
