"""The contract for plugin authors: one module per stage, in pipeline order.

A hook *registers*: it returns objects that satisfy a small Protocol. The core calls those objects one at a time and
attributes their errors to the plugin they came from.
"""

from __future__ import annotations

import pluggy

PROJECT = "djinn"
API_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
