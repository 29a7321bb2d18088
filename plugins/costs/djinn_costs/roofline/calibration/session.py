"""A session to measure in: the executor that the settings name, and programs that run as they were written."""

from __future__ import annotations

from typing import Any

import djinn
from djinn_client.runtime import client


def open_session(**overrides: Any) -> None:
    """Configure this process with `overrides` and connect, without the plugins that look for patterns or rewrite programs.

    What is measured is then exactly what was recorded, and no time goes into what is known of it.

    Raises:
        DjinnError: a setting or a plugin cannot be used, or nothing can be reached.
    """
    djinn.configure(**overrides)
    registry = client.registry()
    rewriting = {
        registry.owners[kind, o.name].name for kind in ("patterns", "optimizations") for o in getattr(registry, kind)
    }
    needed = {registry.owners["cost_models", o.name].name for o in registry.cost_models}
    if unwanted := rewriting - needed:
        djinn.configure(**{**overrides, "disable": (*client.settings().disable, *sorted(unwanted))})
    djinn.init()
