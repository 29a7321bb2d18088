"""Base classes of all conformance suites. They end each test, even if the plugin hangs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import FrameType
from typing import ClassVar, TypeVar

import pytest

from djinn.testing.samples import sample_graphs
from djinn_core.ir.graph import Graph
from djinn_core.registry.contract import object_problem
from djinn_core.registry.kinds import KINDS
from djinn_core.system.processes import SPARE_SIGNAL, signal_main_thread

R = TypeVar("R")
SECONDS = 120.0  # seconds for a single wait, on a machine that also does other work


def require_protocol(item: object, kind: str) -> None:
    """Fail if `item` does not implement the Protocol of its kind. The error message names the faulty member."""
    entry_of_kind = next(entry for entry in KINDS if entry.name == kind)
    assert not (problem := object_problem(item, entry_of_kind)), f"a hook that returns this object would have {problem}"


def missing(suite: object, fixture: str, description: str) -> object:
    """Fail because a suite does not define `fixture`. `description` says what the fixture must return."""
    return pytest.fail(f"{type(suite).__name__} needs a fixture `{fixture}` that returns {description}")


def start(call: Callable[..., R], *arguments: object) -> Future[R]:
    """Run a call on a daemon thread. If the call hangs, the test and the process can still end."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # an exception of the test, as in `concurrent.futures`
            future.set_exception(error)

    threading.Thread(target=run, name="conformance", daemon=True).start()
    return future


def outcome(future: Future[R], message: str, seconds: float | None = None) -> R:
    """Return the result of a started call. If the call takes longer than `seconds`, fail with the message `message`.

    If `seconds` is None, the limit is `SECONDS`.
    """
    limit = SECONDS if seconds is None else seconds
    try:
        return future.result(limit)
    except TimeoutError:
        if future.done():  # the call's own
            raise
        return pytest.fail(f"a call has not ended within {limit:g} s: {message}")


class Ending:
    """Base class of all suites. A test that does not end within `limit_seconds` fails."""

    # Limit of a test in seconds. Override it if your plugin needs long for good reasons.
    limit_seconds: ClassVar[float] = 600.0

    @pytest.fixture(autouse=True)
    def _ending(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread receives signals
            return
        limit = self.limit_seconds

        def fail(_number: int, _frame: FrameType | None) -> None:
            pytest.fail(
                f"the test has not ended after {limit:g} s. The traceback shows where the plugin waits. Give its waits a "
                "timeout, or raise `limit_seconds` of the suite if the test needs more time"
            )

        before = signal.signal(SPARE_SIGNAL, fail)
        timer = threading.Timer(limit, signal_main_thread, (SPARE_SIGNAL,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            signal.signal(SPARE_SIGNAL, before)


class OnGraphs(Ending):
    """Base class of suites for plugins that work on graphs."""

    @pytest.fixture
    def graphs(self) -> Mapping[str, Graph]:
        """Return sample graphs by name. Override this fixture to add your own to `djinn.testing.sample_graphs()`."""
        return sample_graphs()
