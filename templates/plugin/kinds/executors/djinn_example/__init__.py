"""An engine for Djinn: start executors by a command, here with a low priority. It needs djinn-launchers."""

from djinn.hooks import (
    ExecutorEngine,
    ExecutorHandle,
    ExecutorOptions,
    LaunchRequest,
    PipedHandle,
    holder_command,
    hookimpl,
)

djinn_api_version = "2.0"


class ExampleEngine(ExecutorEngine):
    """Used if `djinn.configure(engine="example")` or `djinn serve --engine example` names it."""

    name = "example"

    def launch(self, options: ExecutorOptions, request: LaunchRequest) -> ExecutorHandle:
        """Start an executor."""
        # To start it on another machine, use `ssh -o BatchMode=yes HOST` and `holder_command(PYTHON)` with the path of Python on that machine.
        command = ("nice", "-n", "5", *holder_command())
        towards = "127.0.0.1"  # for an executor on another machine: an address of this machine
        return PipedHandle(command, (options.encode(), request.place, towards), variables=request.runtime_env)


@hookimpl
def djinn_register_executors() -> list[ExecutorEngine]:
    """Return the engines of this plugin."""
    return [ExampleEngine()]
