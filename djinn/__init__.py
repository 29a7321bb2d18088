"""Djinn: a remote accelerator as a local PyTorch device.

    import torch, djinn

    model.to("remote_accelerator:0")

Importing registers the device. The first use connects it: to the servers that `configure` names, or to an executor on
this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn import _lazy_names
from djinn_core import __version__ as __version__
from djinn_core.errors import DjinnError

# Importing all of these would be slow, so each name is imported on first access (`__getattr__`).
if TYPE_CHECKING:
    from djinn import compat, errors, hooks, planning, profiler, testing, weights
    from djinn.profiler import explain_waits, profile, verify
    from djinn_client.interception.deadlines import deadline
    from djinn_client.runtime.client import (
        cancel,
        configure,
        init,
        reset_stats,
        shut_down,
        stats,
        synchronize,
    )
    from djinn_commands.notebook import load_ipython_extension
    from djinn_integrations.weights.open_weights import open_weights, save_weights
    from djinn_kv_cache.session import kv_session
    from djinn_pool.link_measurement import topology
    from djinn_pool.scaling import scale
    from djinn_profiler.captured import capture, explain, get_graph, plan

__all__ = [
    "DjinnError",
    "cancel",
    "capture",
    "configure",
    "deadline",
    "explain",
    "explain_waits",
    "get_graph",
    "init",
    "kv_session",
    "open_weights",
    "plan",
    "profile",
    "reset_stats",
    "save_weights",
    "scale",
    "shut_down",
    "stats",
    "synchronize",
    "topology",
    "verify",
]

_MODULES = {
    "djinn.profiler": "explain_waits profile verify",
    "djinn_profiler.captured": "capture explain get_graph plan",
    "djinn_client.runtime.client": "cancel configure init reset_stats shut_down stats synchronize",
    "djinn_pool.link_measurement": "topology",
    "djinn_client.interception.deadlines": "deadline",
    "djinn_commands.notebook": "load_ipython_extension",
    "djinn_kv_cache.session": "kv_session",
    "djinn_integrations.weights.open_weights": "open_weights save_weights",
    "djinn_pool.scaling": "scale",
}

if not TYPE_CHECKING:  # type checkers know the names from the imports above
    __getattr__, __dir__ = _lazy_names.lazy_names(__name__, _MODULES)

_lazy_names.attach()
