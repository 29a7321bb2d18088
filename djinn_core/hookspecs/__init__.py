"""The contract for plugin authors: a module for each kind of plugin, with its base class, its values and its hook.

A hook *registers*: it returns objects of the base class. The core calls those objects one at a time and attributes their errors to the
plugin they came from.
"""

from __future__ import annotations

from typing import Final

import pluggy

PROJECT: Final = "djinn"

API_VERSION: Final = "2.0"
"""Version of the contract, MAJOR.MINOR. A plugin states the version that it was written for, as `djinn_api_version`.

A minor change adds what no plugin has to know: a member with a default, a value with a default, a kind. A plugin that was written for an
earlier minor version is loaded. A major change removes or changes something that a plugin may use: plugins of other major versions
are refused, and so are plugins of a later minor version. Every change has a line in docs/hooks.md, "Versions of the contract".
"""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
