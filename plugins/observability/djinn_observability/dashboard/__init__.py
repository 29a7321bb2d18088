"""The dashboard: what servers are doing, in a browser and in a terminal.

`djinn --help` imports this module, so its functions import the other modules on use.

- `view`: displayed values, from a status and the previous status. `history`: the past hour and day, in bounded memory.
- `watcher`: polls a server. `pages`: pages below `/dashboard`.
- `operations`: the server of `djinn serve --operations-port`. `listener`: HTTP. `routes`, `responses`: responses.
- `metrics`: `/metrics`.
- `dashboard_command`, `top_command`: `djinn dashboard` and `djinn top`. `terminal`: tables in a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")


@hookimpl
def djinn_register_commands() -> Iterable[click.Command]:
    """Register the commands `dashboard` and `top`."""
    from djinn_observability.dashboard.dashboard_command import dashboard
    from djinn_observability.dashboard.top_command import top

    return [dashboard, top]
