"""State machine for tests of engines: random sequences of operations on an executor, compared with a model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import cast

import attrs
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import booleans, sampled_from

from djinn.testing.executors import dial_executor, expect_end
from djinn.testing.processes import executor_process
from djinn.testing.suite import SECONDS, outcome, start
from djinn_client.runtime.connecting.handshake import attach
from djinn_core.errors import AccessRefused, StartupError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame
from djinn_core.wire.messages import Goodbye, encode
from djinn_server.hookspecs.executors import ExecutorEngine, LaunchRequest
from djinn_server.launch.engines import StartedExecutor, start_executor
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.orders import Drain, End, Evict
from djinn_server.launch.tickets import Badge

_POLL_SECONDS = 0.05


class State(Enum):
    """State of the executor according to the model."""

    STARTING = auto()  # launched, but not awaited yet
    READY = auto()
    ENDED = auto()  # another executor may replace it


@attrs.frozen
class Opened:
    """An open session.

    Attributes:
        connection: the client's connection.
        token: id of the token in the session's ticket.
    """

    connection: Connection
    token: str


class ExecutorStateMachine(RuleBasedStateMachine):
    """Operations on one executor, and a model of its state and its sessions."""

    def __init__(
        self,
        engine: ExecutorEngine,
        launch_request: LaunchRequest | None = None,
        kill: Callable[[StartedExecutor], None] | None = None,
    ) -> None:
        """Test `engine`. `launch_request` and `kill` are as in the fixtures of `ExecutorConformance`."""
        super().__init__()
        self._engine = engine
        self._request = launch_request or LaunchRequest(group="states")
        self._kill = kill or (lambda executor: executor_process(executor.process_id).kill())
        self._numbers = itertools.count()
        self._executor: StartedExecutor
        self._state = State.STARTING
        self._may_close_early = True
        self._draining = False
        self._sessions: dict[str, Opened] = {}  # by id

    @initialize()
    def launch(self) -> None:
        """Launch an executor with an unused number."""
        number = next(self._numbers)
        request = attrs.evolve(self._request, number=number)
        self._executor = start_executor(self._engine, ExecutorConfig("cpu", threads=1), request)
        self._state = State.STARTING

    @precondition(lambda self: self._state is State.STARTING)
    @rule()
    def wait_ready(self) -> None:
        """Wait until the executor is ready. A second call must return an equal report."""
        ready = self._executor.wait_ready(SECONDS)
        assert ready.urls, "an executor that is ready must have an address"
        assert self._executor.wait_ready(0.0) == self._executor.ready == ready, (
            "`ready` and a second `wait_ready` must return the same report"
        )
        self._state = State.READY

    @precondition(lambda self: self._state is State.READY)
    @rule()
    def begin_session(self) -> None:
        """Connect with a ticket, which must admit one client once. A draining executor must admit no client."""
        token = f"token-{next(self._numbers)}"
        ticket = self._executor.issue_ticket("the states", badge=Badge("alice", token))
        if self._draining:
            self._expect_refusal(ticket, "an executor that drains must admit no client")
            return
        connection = dial_executor(self._executor)
        self._sessions[attach(connection, ticket, SECONDS).session] = Opened(connection, token)
        self._expect_refusal(ticket, "a ticket must admit one client")
        self._expect_sessions()

    @precondition(lambda self: self._sessions)
    @rule(way=sampled_from(["its client leaves", "`end`", "`evict`"]))
    def end_session(self, way: str) -> None:
        """End a session. The other sessions must continue."""
        session, opened = self._sessions.popitem()
        if way == "`end`":
            self._executor.send(End(session, "the states end it"))
        elif way == "`evict`":
            self._executor.send(Evict((opened.token,)))
        else:
            opened.connection.send(Frame(encode(Goodbye())))
        expect_end(opened.connection, f"a session must end: {way}")
        if self._draining and not self._sessions:
            self._expect_end("an executor that drains must end after its last session")
        else:
            self._expect_sessions()

    @precondition(lambda self: self._state is State.READY)
    @rule(kills=booleans())
    def stop(self, kills: bool) -> None:
        """Kill the executor, or drain it, so that it ends after its last session."""
        if kills:
            self._kill(self._executor)
            self._expect_end("an executor that was killed must be noticed by `wait`")
            return
        self._executor.send(Drain(SECONDS))
        self._draining = True
        if not self._sessions:
            self._expect_end("an executor that drains must end if it has no session")

    @precondition(lambda self: self._state is State.ENDED)
    @rule()
    def restart(self) -> None:
        """Replace the ended executor by a new executor."""
        self._executor = self._executor.restart()
        self._state = State.STARTING

    @precondition(lambda self: self._state is not State.STARTING or self._may_close_early)
    @rule()
    def close_and_launch(self) -> None:
        """Close the executor in any state, and launch a new executor."""
        self._may_close_early = self._state is not State.STARTING
        self._close()
        self.launch()

    @invariant()
    def alive_as_in_the_model(self) -> None:
        """Check that the executor is alive if the model says so, and only then."""
        alive = self._state is not State.ENDED
        assert self._executor.alive == alive, f"in the state {self._state.name} `alive` must be {alive}"

    def teardown(self) -> None:
        """Close the executor after a sequence of operations."""
        self._close()

    def _close(self) -> None:
        self._executor.close(0.0)
        self._executor.close(0.0)
        self._expect_end("`close` must end the executor")

    def _expect_sessions(self) -> None:
        deadline = time.monotonic() + SECONDS
        while differing := {session.session for session in self._executor.status(SECONDS).sessions} ^ set(
            self._sessions
        ):
            assert time.monotonic() < deadline, f"`status` must report the sessions that run; these differ: {differing}"
            time.sleep(_POLL_SECONDS)

    def _expect_refusal(self, ticket: str, message: str) -> None:
        try:
            connection = dial_executor(self._executor)
        except TransportError:
            assert self._draining, "an executor must listen until it drains"
            return
        try:
            attach(connection, ticket, SECONDS)
        except (AccessRefused, TransportError):
            connection.close()
        else:
            raise AssertionError(message)

    def _expect_end(self, message: str) -> None:
        outcome(start(self._executor.wait), message)
        assert self._executor.ending(), "after `wait`, `ending` must say how the executor ended"
        try:
            self._executor.status(1.0)
        except StartupError:
            pass
        else:
            raise AssertionError("`status` of an ended executor must raise StartupError")
        self._executor.send(Drain(0.0))  # `send` raises nothing
        for opened in self._sessions.values():
            opened.connection.close()
        self._sessions.clear()
        self._draining, self._state = False, State.ENDED


def run_executor_states(
    engine: ExecutorEngine,
    launch_request: LaunchRequest | None = None,
    kill: Callable[[StartedExecutor], None] | None = None,
    examples: int = 10,
    steps: int = 20,
) -> None:
    """Run random sequences of operations on executors of an engine. Raise an error at the first difference from the model.

    Args:
        engine: starts the executors.
        launch_request: a request that the engine can fulfil, if executors need an address or resources.
        kill: kills an executor, if executors are not on this machine.
        examples: number of sequences. Each takes seconds, because it starts processes.
        steps: maximum number of operations in a sequence.
    """
    make = cast("type[ExecutorStateMachine]", lambda: ExecutorStateMachine(engine, launch_request, kill))
    run_state_machine_as_test(
        make,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a shorter order is not worth its processes
            suppress_health_check=list(HealthCheck),
        ),
    )
