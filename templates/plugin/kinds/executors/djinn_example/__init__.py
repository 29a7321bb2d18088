"""An engine for Djinn: executors behind a command, here one that gives them a low priority. It needs djinn-launchers."""

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
    """Used where `djinn.configure(engine="example")` or `djinn serve --engine example` names it."""

    name = "example"

    def launch(self, options: ExecutorOptions, request: LaunchRequest) -> ExecutorHandle:
        """Start an executor."""
        # `ssh -o BatchMode=yes HOST` leads to another machine: with `holder_command(PYTHON)`, the interpreter there.
        command = ("nice", "-n", "5", *holder_command())
        towards = "127.0.0.1"  # for an executor on another machine: an address of this one
        return PipedHandle(command, (options.encode(), request.place, towards), variables=request.runtime_env)


@hookimpl
def djinn_register_executors() -> list[ExecutorEngine]:
    """The engines that this plugin offers."""
    return [ExampleEngine()]
