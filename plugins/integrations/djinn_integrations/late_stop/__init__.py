"""Late stop checks: transformers' `generate()` runs on a remote device without waiting for the stop check of each token."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from djinn.hooks import Integration, hookimpl

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """Return the adapter for the module of transformers that checks whether sequences are finished."""
    return [Integration("late_stop", "transformers.generation.utils", _adapt)]


def _adapt(module: ModuleType) -> None:
    from djinn_integrations.late_stop.seam import adapt  # imported late, because it imports more of transformers

    adapt(module)
