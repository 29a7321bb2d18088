"""The magics `%djinn_status` and `%%djinn_profile`."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import attrs
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display
from rich.console import Console

import djinn_client.runtime.client as djinn_client
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime.connecting.servers import PATIENCE, ask_named, ask_servers
from djinn_commands.servers.status_text import show_all
from djinn_core.errors import DjinnError
from djinn_core.system.printable import size_text
from djinn_core.wire.messages import StatsReply, StatsRequest

WIDTH = 120  # maximum characters of an output line


@magics_class
class DjinnMagics(Magics):
    """The magics of `%load_ext djinn`."""

    @magic_arguments()
    @argument(
        "servers",
        nargs="*",
        help="log-ins or URLs of servers. Default: the configured servers, or this program's own executors",
    )
    @line_magic
    def djinn_status(self, line: str) -> None:
        """Show the sessions, devices and memory of servers, as `djinn status` does."""
        names = tuple(parse_argstring(self.djinn_status, line).servers)
        try:
            print(_of_servers(names) or _of_this_program())  # noqa: T201 - the output of the cell
        except DjinnError as error:
            raise UsageError(str(error)) from None

    @magic_arguments()
    @argument("--save", type=Path, metavar="FILE", help="write the trace, for https://ui.perfetto.dev")
    @argument("--ops", action="store_true", help="have executors time each op")
    @argument("-o", "--output", metavar="NAME", help="keep the timeline under this name")
    @cell_magic
    def djinn_profile(self, line: str, cell: str) -> None:
        """Run the cell and show a profile of its time, as `djinn.profile()` does."""
        profile: Any = importlib.import_module(
            "djinn"
        ).profile  # imported by name, because an import statement would be circular
        arguments = parse_argstring(self.djinn_profile, line)
        if arguments.save is not None:
            try:
                arguments.save.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"the folder '{arguments.save.parent}' for the trace cannot be created ({error}): choose another --save FILE"
                ) from None
        shell: Any = self.shell
        # The kernel's event loop already runs in this call.
        if shell.should_run_async(cell, transformed_cell=shell.transform_cell(cell)):
            raise UsageError(
                "`%%djinn_profile` cannot run a cell with `await`: use `with djinn.profile() as prof:` around the awaited code"
            )
        with profile(ops=arguments.ops) as timeline:
            shell.run_cell(cell)  # shows results and errors; work before an error is also profiled
        display(timeline)
        if arguments.output:
            shell.push({arguments.output: timeline})
        if arguments.save is not None:
            timeline.save(arguments.save)
            print(f"written to {arguments.save}")  # noqa: T201


def _of_servers(names: tuple[str, ...]) -> str:
    """Return the status of the named servers, or of the configured servers if `names` is empty.

    Return an empty string if no server is configured.
    """
    settings = djinn_client.settings()
    hurried = attrs.evolve(
        settings, connect_timeout=min(settings.connect_timeout, PATIENCE)
    )  # short timeout, because a person waits
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    show_all(console, ask_named(names) if names else ask_servers(hurried))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def _of_this_program() -> str:
    """Return the status of the executors that this program started without a server."""
    if not djinn_client.is_initialized():
        return "no server is configured, and no executor runs yet: the first use of the device starts one"
    state = djinn_client.get_runtime_state()
    lines: list[str] = []
    for number, (server, device) in enumerate(zip(state.servers, state.devices, strict=True), 1):
        figures = port.sink.ask(StatsRequest(), StatsReply, number if len(state.devices) > 1 else 0).values
        free = f", {size_text(device.memory_free)} free" if device.memory_free is not None else ""
        memory, most = size_text(figures["memory"]), size_text(figures["memory_peak"])
        lines += [
            f"{server}: {device.id} {device.name}{free}",
            f"    {figures['values']:,} values, {memory} (at most {most} at a time), {figures['submissions']:,} submissions",
        ]
    return "\n".join(lines)
