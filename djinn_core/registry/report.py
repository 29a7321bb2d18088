"""Load status of each plugin, as `djinn plugins` shows it."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import attrs

from djinn_core.registry.kinds import KINDS

Status = Literal["active", "disabled", "unselected", "failed"]


@attrs.frozen
class PluginRow:
    """A plugin that is built in, installed, or named by the user.

    Attributes:
        name: name of the entry point, or of the module or object.
        kind: the kinds of hook that it implements, in pipeline order, joined by commas; empty if it was not loaded.
        distribution: name of the distribution that contains it; empty if there is none.
        version: version of the distribution; empty if there is none.
        status: `active`; `disabled` by the setting `disable`; `unselected` because the setting `plugins` does not name
            it; `failed`, for the reason in `error`.
        error: reason why it cannot be used, and what to do; None if it can.
    """

    name: str
    kind: str
    distribution: str
    version: str
    status: Status
    error: str | None = None

    @property
    def processes(self) -> tuple[str, ...]:
        """The processes that call its hooks; empty if it was not loaded."""
        kinds = self.kind.split(",")
        return tuple(dict.fromkeys(process for kind in KINDS if kind.name in kinds for process in kind.processes))

    @property
    def label(self) -> str:
        """Name of the plugin in messages: `plugin 'attention' (djinn-attention 26.11.0)`."""
        origin = " ".join(part for part in (self.distribution, self.version) if part)
        return f"plugin {self.name!r} ({origin or 'given as an object'})"


@cache
def log() -> Any:
    """Return the logger of plugins.

    It is created on first use, because `djinn --help` loads plugins without structlog.
    """
    from djinn_core.logs import get_logger

    return get_logger("djinn.plugins")
