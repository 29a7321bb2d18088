"""The backend of `torch.compile(backend="djinn")`, which records a whole Dynamo graph in one step."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from djinn.hooks import Integration, hookimpl
from djinn_integrations.dynamo.switch import recording

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """Return the integration that lets the backend record whole graphs. PyTorch finds the backend by an entry point."""
    return [Integration("dynamo", "torch._dynamo", _switch_on)]


def _switch_on(module: ModuleType) -> None:
    del module
    recording.on = True
