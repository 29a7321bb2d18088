"""A launcher for Djinn: executors are processes on this machine, and it says that they start."""

from __future__ import annotations

from djinn.hooks import ExecutorOptions, Launched, Launcher, LaunchWish, hookimpl
from djinn.launchers import LocalLauncher

djinn_api_version = 1


class ExampleLauncher:
    """Used where `djinn.configure(engine="example")` names it. On other machines, an engine runs an `ExecutorHolder`."""

    name = "example"

    def launch(self, options: ExecutorOptions, wish: LaunchWish) -> Launched:
        """An executor that was started."""
        wish.notify(f"starting executor {wish.number + 1} of {wish.count} for {options.device or 'the best device'}")
        return LocalLauncher().launch(options, wish)


@hookimpl
def djinn_register_launchers() -> list[Launcher]:
    """The launchers that this plugin offers."""
    return [ExampleLauncher()]
