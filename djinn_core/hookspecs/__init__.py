"""The contract for plugin authors. Each module has one kind of plugin: its base class, its values and its hook.

Kinds that only clients or servers call are in `djinn_client.hookspecs` and `djinn_server.hookspecs`.

A hook *registers*: it returns objects of the base class. The core calls these objects one at a time. It attributes an
error to the plugin whose object raised it.
"""

from __future__ import annotations

from typing import Final

import pluggy

PROJECT: Final = "djinn"

API_VERSION: Final = "2.0"
"""Version of the contract, MAJOR.MINOR.

A plugin declares the version it was written for as `djinn_api_version`. A minor version adds optional members, default
values or kinds of plugins, so plugins for earlier minor versions are loaded. A major version removes or changes
members. Plugins for another major version or a later minor version are refused. docs/hooks.md lists all changes in
"Versions of the contract".
"""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
