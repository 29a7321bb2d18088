"""For plugins with a weight source or format, and for those that have a library's weights read by the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import importing
from djinn_core.hookspecs.weight_formats import FileHeader, HeaderEntry
from djinn_core.wire.tensors import dtype_name

# Of the client, and of the server: not every machine has both.
if TYPE_CHECKING:
    from djinn_client.runtime.open_weights import (
        RemoteWeights,
        WeightSlice,
        hub_address,
        open_weights,
        remove_weights,
        save_weights,
        server_weights,
        whole_device,
    )
    from djinn_client.runtime.server_files import address_in, loading_stays_on, place_of, saved_at, write_pointer_file
    from djinn_server.builtins.weights import LocalFile, open_folder
    from djinn_server.weights.headers import LONGEST_NAME, MOST_DIMENSIONS, MOST_TENSORS, read_bytes, refuse_overlaps
    from djinn_server.weights.permissions import allows

__all__ = [
    "LONGEST_NAME",
    "MOST_DIMENSIONS",
    "MOST_TENSORS",
    "FileHeader",
    "HeaderEntry",
    "LocalFile",
    "RemoteWeights",
    "WeightSlice",
    "address_in",
    "allows",
    "dtype_name",
    "hub_address",
    "loading_stays_on",
    "open_folder",
    "open_weights",
    "place_of",
    "read_bytes",
    "refuse_overlaps",
    "remove_weights",
    "save_weights",
    "saved_at",
    "server_weights",
    "whole_device",
    "write_pointer_file",
]

_PLACES = {
    "djinn_client.runtime.open_weights": (
        "RemoteWeights WeightSlice hub_address open_weights remove_weights save_weights server_weights whole_device"
    ),
    "djinn_client.runtime.server_files": "address_in loading_stays_on place_of saved_at write_pointer_file",
    "djinn_server.builtins.weights": "LocalFile open_folder",
    "djinn_server.weights.headers": "LONGEST_NAME MOST_DIMENSIONS MOST_TENSORS read_bytes refuse_overlaps",
    "djinn_server.weights.permissions": "allows",
}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _PLACES)
