"""An engine for Djinn: executors behind a command, here one that gives them a low priority."""

from __future__ import annotations

from djinn.executors import HeldExecutor, PipedCalls, holder_command
from djinn.hooks import ExecutorEngine, ExecutorOptions, Launched, LaunchWish, hookimpl

djinn_api_version = "2.0"


class ExampleEngine:
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
def djinn_register_executors() -> list[ExecutorEngine]:
    """The engines that this plugin offers."""
    return [ExampleEngine()]
