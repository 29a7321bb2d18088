"""Open a session for measurements: with the configured executor, and without plugins that rewrite programs."""

from __future__ import annotations

from typing import Any

import djinn
from djinn_client.runtime import client


def open_session(**overrides: Any) -> None:
    """Configure this process and connect to the executor, without plugins that match patterns or rewrite programs.

    The measured program is then exactly the recorded program, and planning takes no time. `overrides`: settings by
    name.

    Raises:
        DjinnError: a setting or a plugin cannot be used, or no executor can be reached.
    """
    djinn.configure(**overrides)
    registry = client.registry()
    rewriting = {
        registry.owners[kind, o.name].name for kind in ("patterns", "optimizations") for o in getattr(registry, kind)
    }
    plugin_names = {registry.owners["cost_models", o.name].name for o in registry.cost_models}
    if unwanted := rewriting - plugin_names:
        djinn.configure(**{**overrides, "disable": (*client.settings().disable, *sorted(unwanted))})
    djinn.init()
