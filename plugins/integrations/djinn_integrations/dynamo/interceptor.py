"""Switch for recording whole graphs at once: on while the plugin is installed in this process."""

from __future__ import annotations


class _Installed:
    now = False


installed = _Installed()


class DynamoInterceptor:
    """Records graphs that `torch.compile(backend="djinn")` has traced. The backend itself is found by PyTorch."""

    name = "dynamo"

    def install(self) -> None:
        """From now on graphs are recorded in one step."""
        installed.now = True

    def uninstall(self) -> None:
        """From now on graphs run op by op."""
        installed.now = False
