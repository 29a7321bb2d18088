"""Conformance suite for engines, which start executors."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator

import attrs
import pytest

from djinn.testing.processes import executor_process
from djinn.testing.suite import SECONDS, Ending, missing, outcome, require_protocol, start
from djinn_client.runtime.connecting.handshake import ask, attach
from djinn_core.errors import AccessRefused, StartupError
from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.protocol.addresses import transport_for
from djinn_core.protocol.tls_transports import transports_trusting
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.wire.messages import Goodbye, StatsReply, StatsRequest, encode
from djinn_server.hookspecs.executors import ExecutorEngine, LaunchRequest
from djinn_server.launch.engines import StartedExecutor, start_executor
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.orders import Drain, End, Evict
from djinn_server.launch.tickets import Badge

_ENDED = "an executor that has ended must be noticed by `wait` and `alive`"


class ExecutorConformance(Ending):
    """Tests that every engine must pass.

    Subclass this class and define the fixture `engine`, and `launch_request` if executors need an address or resources.
    """

    @pytest.fixture
    def engine(self) -> ExecutorEngine:
        """Return the engine under test."""
        return missing(self, "engine", "your engine")  # type: ignore[return-value]

    @pytest.fixture
    def launch_request(self) -> LaunchRequest:
        """Return a request that the engine can fulfil.

        Override this fixture if executors need an address or resources.
        """
        return LaunchRequest(group="conformance")

    @pytest.fixture
    def options(self) -> ExecutorConfig:
        """Return the configuration of the executors: the CPU with one thread."""
        return ExecutorConfig("cpu", threads=1)

    @pytest.fixture
    def kill(self) -> Callable[[StartedExecutor], None]:
        """Return a function that kills an executor. Override this fixture if executors run on other machines."""
        return lambda launched: executor_process(launched.process_id).kill()

    @pytest.fixture
    def launch(
        self, engine: ExecutorEngine, options: ExecutorConfig, launch_request: LaunchRequest
    ) -> Iterator[Callable[..., StartedExecutor]]:
        """Yield a function that launches an executor. Close all executors after the test."""
        launched: list[StartedExecutor] = []

        def launch(number: int = 0, count: int = 1) -> StartedExecutor:
            launched.append(start_executor(engine, options, attrs.evolve(launch_request, number=number, count=count)))
            return launched[-1]

        yield launch
        for started in launched:
            started.close(0.0)

    def test_engine_has_every_member(self, engine: ExecutorEngine) -> None:
        """The engine has all attributes and methods of `ExecutorEngine`, and a valid name."""
        require_protocol(engine, "executors")
        assert re.fullmatch(r"[A-Za-z0-9_-]+", engine.name), f"name {engine.name!r}: use only letters, digits, - and _"

    def test_ticket_admits_one_client(self, launch: Callable[..., StartedExecutor]) -> None:
        """A ticket admits one connection. The executor reports its sessions, and ends a session on request."""
        executor = launch()
        with pytest.raises(StartupError):
            _ = executor.ready
        ready = executor.wait_ready(SECONDS)
        assert executor.ready == ready == executor.wait_ready(0.0), (
            "`ready` must be the report that `wait_ready` returned"
        )
        assert executor.alive, "an executor that is ready must be `alive`"
        assert executor.process_id == ready.process, (
            "`process_id` must be the process id that the executor reports in `ready`"
        )
        assert not executor.place or all(not url.startswith("unix:") for url in ready.urls), (
            "an executor on another machine must not report the address of a Unix socket"
        )
        assert executor.full() == "", "`full` must return an empty text if no client was refused"
        ticket = executor.issue_ticket("the suite", badge=Badge("alice", "key-of-alice"))
        assert executor.tenant == "alice", "`tenant` must be the tenant of the latest ticket"
        connection = dial_executor(executor)
        session = attach(connection, ticket, SECONDS).session
        ask(connection, StatsRequest(), StatsReply, SECONDS, "the executor")
        report = executor.status(SECONDS)
        assert [session_status.session for session_status in report.sessions] == [session], (
            "`status` must report the open session"
        )
        assert report.tokens == ("key-of-alice",), "`status` must report the token of the ticket's badge"
        with pytest.raises(AccessRefused):
            attach(dial_executor(executor), ticket, SECONDS)
        with pytest.raises(AccessRefused):
            attach(dial_executor(executor), executor.issue_ticket(lifetime=-1.0), SECONDS)
        executor.send(End(session, "the suite ends it"))
        expect_end(connection, "`end` must end the session")
        again = dial_executor(executor)
        attach(again, executor.issue_ticket(badge=Badge("alice", "key-of-alice")), SECONDS)
        executor.send(Evict(("key-of-alice",)))
        expect_end(again, "`evict` must end the sessions of the token")

    def test_killed_executor_is_replaced(
        self, launch: Callable[..., StartedExecutor], kill: Callable[[StartedExecutor], None]
    ) -> None:
        """The engine notices that an executor was killed, and the new executor admits clients."""
        executor = launch()
        executor.wait_ready(SECONDS)
        connection = dial_executor(executor)
        before = attach(connection, executor.issue_ticket(), SECONDS).instance
        kill(executor)
        outcome(start(executor.wait), _ENDED)
        assert not executor.alive, _ENDED
        assert executor.ending(), "`ending` must say how the executor ended"
        with pytest.raises(StartupError):
            executor.status(1.0)
        connection.close()
        executor = executor.restart()
        try:
            assert executor.wait_ready(SECONDS).process == executor.process_id, (
                "`process_id` must be the id of the new executor"
            )
            connection = dial_executor(executor)
            instance = attach(connection, executor.issue_ticket(), SECONDS).instance
            assert instance != before, "`restart` must return a new executor, but it returned the former one"
            connection.send(Frame(encode(Goodbye())))
            connection.close()
        finally:
            executor.close(0.0)
        outcome(start(executor.wait), "`close` must end the executor")

    def test_draining_executor_ends_with_its_last_session(self, launch: Callable[..., StartedExecutor]) -> None:
        """A draining executor waits for its session, and ends after it.

        `close` may be called before an executor is ready, and several times.
        """
        executor, second = launch(count=2), launch(number=1, count=2)
        executor.wait_ready(SECONDS)
        connection = dial_executor(executor)
        attach(connection, executor.issue_ticket(), SECONDS)
        executor.send(Drain(SECONDS))
        second.close(0.0)
        outcome(start(second.wait), "`close` must end the executor")
        assert executor.alive, "`drain` must not end an open session"
        connection.send(Frame(encode(Goodbye())))
        connection.close()
        outcome(start(executor.wait), "the executor must end after its last session")
        executor.close(0.0)
        executor.close(0.0)

    def test_failed_start_reports_the_reason(self, engine: ExecutorEngine, launch_request: LaunchRequest) -> None:
        """If an executor cannot start, `wait_ready` raises `StartupError` with the executor's own reason."""
        executor = start_executor(engine, ExecutorConfig("no-such-device", threads=1), launch_request)
        try:
            with pytest.raises(StartupError, match="no-such-device"):
                executor.wait_ready(SECONDS)
            assert not executor.alive, "the executor must have ended if `wait_ready` raises"
            executor = executor.restart()
            with pytest.raises(StartupError, match="no-such-device"):
                executor.wait_ready(SECONDS)
        finally:
            executor.close(0.0)


def dial_executor(executor: StartedExecutor) -> Connection:
    """Connect to an executor that is ready."""
    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"})
    url = executor.ready.urls[0]
    return transport_for(url, transports_trusting(registry.transports, executor.fingerprint)).connect(
        url, Limits(), SECONDS
    )


def expect_end(connection: Connection, message: str) -> None:
    """Wait until the other end has closed the connection.

    The other end may send a reason first. If the other end does not close, fail with `message`.
    """

    def read() -> None:
        try:
            while True:
                connection.receive(SECONDS)
        except Exception as error:
            assert not isinstance(error, TimeoutError), message

    outcome(start(read), message)
    connection.close()
