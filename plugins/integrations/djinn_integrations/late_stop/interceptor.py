"""Switch for late stop checks: on while the plugin is installed in this process."""

from __future__ import annotations

from types import ModuleType

from djinn.libraries import adapt_on_import


class _Installed:
    now = False
    adapting = False


installed = _Installed()


class LateStopInterceptor:
    """Lets `generate()` go on while the replies to its stop checks are under way."""

    name = "late_stop"

    def install(self) -> None:
        """From now on, also where transformers is imported later."""
        if not installed.adapting:
            adapt_on_import({"transformers.generation.utils": _adapt})
            installed.adapting = True
        installed.now = True

    def uninstall(self) -> None:
        """From now on every check is waited for."""
        installed.now = False


def _adapt(module: ModuleType) -> None:
    """The change of transformers, which is imported with it."""
    from djinn_integrations.late_stop.seam import adapt

    adapt(module)
