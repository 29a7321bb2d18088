"""A launcher for Djinn: executors behind a command, here one that gives them a low priority."""

from __future__ import annotations

from djinn.hooks import ExecutorOptions, Launched, Launcher, LaunchWish, hookimpl
from djinn.launchers import HeldExecutor, PipedCalls, holder_command

djinn_api_version = 1


class ExampleLauncher:
    """Used where `djinn.configure(engine="example")` or `djinn serve --engine example` names it."""

    name = "example"

    def launch(self, options: ExecutorOptions, wish: LaunchWish) -> Launched:
        """An executor that was started."""
        wish.notify(f"starting executor {wish.number + 1} of {wish.count} for {options.device or 'the best device'}")
        # `ssh -o BatchMode=yes HOST` leads to another machine: with `holder_command(PYTHON)`, the interpreter there.
        command = ("nice", "-n", "5", *holder_command())
        place = f"{wish.group}-{wish.number}"  # the same for executors that follow each other
        towards = "127.0.0.1"  # for an executor on another machine: an address of this one
        return HeldExecutor(PipedCalls(command, (options.encode(), place, towards), variables=wish.runtime_env))


@hookimpl
def djinn_register_launchers() -> list[Launcher]:
    """The launchers that this plugin offers."""
    return [ExampleLauncher()]
