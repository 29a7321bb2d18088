"""An engine that holds executors in a thread of this process, as engines do on other machines."""

from __future__ import annotations

from concurrent.futures import Future

import attrs

from djinn.errors import StartupError
from djinn.hooks import ExecutorEngine, ExecutorHandle, ExecutorHolder, hookimpl
from djinn.testing.suite import start


@attrs.define
class HeldHandle(ExecutorHandle):
    arguments: tuple
    holder: ExecutorHolder | None = None
    gone: Future | None = None

    def __attrs_post_init__(self):
        self.holder = ExecutorHolder(*self.arguments)
        self.gone = start(self.holder.wait)

    def wait_placed(self):
        pass

    def call(self, method, *arguments, timeout):
        if self.holder is None:
            raise StartupError("its holder has ended")
        return getattr(self.holder, method)(*arguments)

    def send(self, method, *arguments):
        if self.holder is not None:
            getattr(self.holder, method)(*arguments)

    def wait(self):
        return self.gone.result()

    @property
    def ended(self):
        return self.gone.done()

    def end(self):
        self.holder = None

    def restart(self):
        self.end()
        return HeldHandle(self.arguments)


class HeldEngine(ExecutorEngine):
    name = "held"

    def __init__(self):
        self.requests = []

    def launch(self, options, request):
        self.requests.append(request)
        return HeldHandle((options.encode(), request.place, "127.0.0.1"))


@attrs.define(eq=False)
class HeldPlugin:
    engine: HeldEngine
    djinn_api_version: str = "2.0"

    @hookimpl
    def djinn_register_executors(self):
        return [self.engine]
