"""For plugins with a weight source, and for those that have a library's weights read by the server."""

from __future__ import annotations

from djinn_core.builtins.weights import LocalFile, open_folder
from djinn_core.hookspecs.weights import WEIGHT_SUFFIXES
from djinn_core.runtime.open_weights import RemoteWeights, WeightSlice, server_weights

__all__ = ["WEIGHT_SUFFIXES", "LocalFile", "RemoteWeights", "WeightSlice", "open_folder", "server_weights"]
