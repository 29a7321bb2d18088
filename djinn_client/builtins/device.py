"""The built-in interceptor: the PyTorch device `remote_accelerator`."""

from __future__ import annotations

from collections.abc import Iterable

from djinn_client.interception.install import install
from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.interceptors import Interceptor

djinn_api_version = "2.0"


class DeviceInterceptor:
    """Records what PyTorch does on `remote_accelerator`."""

    name = "device"

    def install(self) -> None:
        """Register the device; it is registered already where `djinn` was imported."""
        install()

    def uninstall(self) -> None:
        """Nothing: PyTorch keeps a device for as long as the process lives."""


@hookimpl
def djinn_register_interceptors() -> Iterable[Interceptor]:
    """The device."""
    return [DeviceInterceptor()]
