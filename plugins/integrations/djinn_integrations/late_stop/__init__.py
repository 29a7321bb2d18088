"""transformers' `generate()` on a remote device does not wait at each token to learn if it should stop."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from djinn.hooks import Integration, hookimpl

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """The module of transformers that checks if a sequence is finished."""
    return [Integration("late_stop", "transformers.generation.utils", _adapt)]


def _adapt(module: ModuleType) -> None:
    from djinn_integrations.late_stop.seam import adapt  # here, because it imports more of transformers

    adapt(module)
