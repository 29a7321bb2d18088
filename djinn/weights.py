"""Weights that a server reads and caches: files at its addresses, published tensors, and helpers for weight formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import lazy_names

# Parts of the client and of the server: not every machine has both.
if TYPE_CHECKING:
    from djinn_integrations.weights.open_weights import RemoteWeights, open_weights, remove_weights, save_weights
    from djinn_integrations.weights.published import Publication, attach, publish, published, unpublish
    from djinn_server.weights.headers import read_bytes
    from djinn_server.weights.permissions import allows

__all__ = [
    "Publication",
    "RemoteWeights",
    "allows",
    "attach",
    "open_weights",
    "publish",
    "published",
    "read_bytes",
    "remove_weights",
    "save_weights",
    "unpublish",
]

_MODULES = {
    "djinn_integrations.weights.open_weights": "RemoteWeights open_weights remove_weights save_weights",
    "djinn_integrations.weights.published": "Publication attach publish published unpublish",
    "djinn_server.weights.headers": "read_bytes",
    "djinn_server.weights.permissions": "allows",
}

if not TYPE_CHECKING:  # type checkers know the names from the imports above
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
