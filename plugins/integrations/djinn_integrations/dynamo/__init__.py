"""`torch.compile(backend="djinn")`: a graph that Dynamo has traced is recorded in one step."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from djinn.hooks import Integration, hookimpl
from djinn_integrations.dynamo.switch import recording

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """Recording of graphs in one step. PyTorch finds the backend itself, by an entry point of its own group."""
    return [Integration("dynamo", "torch._dynamo", _switch_on)]


def _switch_on(module: ModuleType) -> None:
    del module
    recording.on = True
