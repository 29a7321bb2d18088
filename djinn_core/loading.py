"""Imports what a client consists of without garbage collection: each would look at all that PyTorch has made, up to 0.15 s."""

from __future__ import annotations

import importlib

from djinn_core.interception.recording.gc_pause import collect_later

with collect_later:
    importlib.import_module("djinn_core.runtime.client")
    importlib.import_module("djinn_core.runtime.captured")
    importlib.import_module("djinn_core.runtime.open_weights")
    importlib.import_module("djinn_core.runtime.published")
    importlib.import_module("djinn_core.runtime.server_files")
    importlib.import_module("djinn_core.runtime.verifying")
    importlib.import_module("djinn_core.runtime.waits")
    importlib.import_module("djinn_core.scheduler")
