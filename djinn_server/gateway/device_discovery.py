"""Find the devices that `djinn serve --device all` offers.

Device plugins are queried in a separate process. The query opens some devices, and the gateway should not occupy
their memory.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from djinn_core.errors import StartupError
from djinn_core.logs import get_logger
from djinn_core.registry.selection import Selection
from djinn_server.devices import FALLBACK
from djinn_server.hookspecs.devices import Device
from djinn_server.launch.command import executor_environment

ALL = "all"
_log = get_logger("djinn.server")


class Discovery(msgspec.Struct, frozen=True):
    """Result of a query of all device plugins: device ids, and the errors of failed plugins by kind of device."""

    devices: list[str]
    failed: Mapping[str, str]


def expand_all(devices: Sequence[str], plugins: Selection, timeout: float) -> list[str]:
    """Return `devices` with `all` replaced by all devices that plugins report: CPUs only if no other device exists.

    Raises:
        StartupError: the query of the device plugins failed.
    """
    if ALL not in devices:
        return list(devices)
    present = _query(plugins, timeout)
    accelerators = [device for device in present if device.partition(":")[0] != FALLBACK]
    named_devices = [device for device in devices if device != ALL]
    return [*named_devices, *(device for device in accelerators or present if device not in named_devices)]


def _query(plugins: Selection, timeout: float) -> list[str]:
    command = [sys.executable, "-P", "-m", __name__]
    order = msgspec.json.encode(plugins.sendable())  # not in the arguments: settings may contain secrets
    try:
        process = subprocess.run(
            command, input=order, env=executor_environment(), stdout=subprocess.PIPE, timeout=timeout, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StartupError(f"cannot list the devices of this machine: {error}. Name them with --device") from error
    discovery = msgspec.json.decode(process.stdout.splitlines()[-1], type=Discovery)
    for kind, error_text in discovery.failed.items():
        _log.warning("cannot list the devices of a kind: they are not used", kind=kind, error=error_text)
    return discovery.devices


def discover(devices: Iterable[Device]) -> Discovery:
    """Return the devices that executors may choose by default. A kind whose query raises has no devices."""
    device_ids: list[str] = []
    errors: dict[str, str] = {}
    for device in devices:
        if not device.chosen_by_name:
            try:
                device_ids += [capabilities.id for capabilities in device.discover()]
            except Exception as error:
                errors[device.name] = repr(error)
    return Discovery(device_ids, errors)


def main() -> None:
    """Print the `Discovery` as JSON."""
    from djinn_core.registry.builtin_plugins import builtin_plugins
    from djinn_core.registry.registry import load_registry
    from djinn_core.system.role import become_server

    become_server("executor")
    selection = msgspec.json.decode(sys.stdin.buffer.read(), type=Selection)
    registry = load_registry(selection, builtins=builtin_plugins(), kinds={"devices"}, started=True)
    sys.stdout.write(f"{msgspec.json.encode(discover(registry.devices)).decode()}\n")


if __name__ == "__main__":
    main()
