"""Pool of a gateway's executor processes. The gateway supervises them, and restarts them if they die."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from djinn_core.errors import DjinnError, StartupError
from djinn_core.logs import get_logger
from djinn_core.protocol.backoff import Backoff
from djinn_core.wire.executor_reports import Distribution, Sessions
from djinn_core.wire.messages import DeviceInfo, ExecutorStatus
from djinn_server.events import ServerEvents
from djinn_server.gateway.assignment import Assigner, LoadMeter
from djinn_server.hookspecs.assignment_policies import AssignmentRefusal, AssignmentRequest, ExecutorLoad, TenantLoad
from djinn_server.hookspecs.authenticators import Denial
from djinn_server.hookspecs.executors import ExecutorEngine, LaunchRequest
from djinn_server.launch.engines import LocalEngine, StartedExecutor, start_executor
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.orders import Drain, Order

_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 30.0
_STATUS_SECONDS = 2.0
BUSY: Final = "busy"  # kind of a denial after which a retry may soon succeed
# Metrics that `djinn status` and dashboards show.
SHOWN: Final = frozenset(
    "submissions ops queue_seconds decode_seconds device_seconds encode_seconds fetched_bytes received_bytes op_failures "
    "quota_refusals memory_refusals submissions_stopped waiting_sessions longest_wait_seconds memory_bytes "
    "memory_limit_bytes memory_pressure_level shared_weight_bytes evicted_bytes spill_bytes resident_memory_bytes "
    "sessions_closed disk_bytes evictions".split()
)
_log = get_logger("djinn.server")


class SupervisedExecutor:
    """An executor of a pool. Its process is supervised, and replaced if it dies.

    Attributes:
        device_id: id of the device; before the process is ready, the device's name in the configuration.
        restarts: number of restarts of the process.
        meter: measures the load of the executor, across restarts.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        start_timeout: float,
        events: ServerEvents,
        engine: ExecutorEngine,
        request: LaunchRequest,
    ) -> None:
        """Start the first process, without waiting for it. `request`: launch request for `engine`."""
        self._config = config
        self._events = events
        self._start_timeout = start_timeout
        self._closing = threading.Event()
        self._state = "starting"
        self.device_id = config.device
        self.restarts = 0
        self._restarted_at = -math.inf
        self.meter = LoadMeter()
        self._process: StartedExecutor = start_executor(engine, config, request)
        self._watcher = threading.Thread(target=self._watch, name="djinn-watch", daemon=True)

    def wait_ready(self) -> None:
        """Wait until the first process is ready, then supervise it.

        Raises:
            StartupError: the process did not start.
        """
        self.device_id = self._process.wait_ready(self._start_timeout).device.id
        self._state = "ready"
        self._watcher.start()

    @property
    def launched(self) -> StartedExecutor | None:
        """The ready process; None while it starts or restarts."""
        return self._process if self._state == "ready" else None

    def status(self) -> ExecutorStatus:
        """Return the executor's entry in `djinn status`."""
        process, state = self._process, self._state
        if state == "ready":
            try:
                report = self._report()
                load = self.meter.load()
                busy = round(load.busy + load.beginning, 3)
                figures = {name: value for name, value in _figures(report) if name in SHOWN}
                return ExecutorStatus(
                    report.device,
                    process.process_id,
                    state,
                    report.sessions,
                    busy,
                    restarts=self.restarts,
                    figures=figures,
                    models=report.models,
                    queue=_queue(report),
                    log=report.log,
                )
            except StartupError as error:
                _log.warning("an executor does not report", process=process.process_id, error=str(error))
                state = "silent"
        name = self.device_id or "default"
        about = DeviceInfo(id=name, kind=name.partition(":")[0])
        return ExecutorStatus(about, process.process_id, state, restarts=self.restarts)

    def is_idle(self, seconds: float) -> bool:
        """Return True if the executor answers, has no session, and was not restarted within the last `seconds`.

        After a restart, clients of the dead process may still reconnect.
        """
        report = self.report()
        return report is not None and not report.sessions and time.monotonic() - self._restarted_at >= seconds

    def report(self) -> Sessions | None:
        """Return the executor's report of its sessions, or None if it is not ready or does not answer."""
        if self._state != "ready":
            return None
        try:
            return self._report()
        except StartupError as error:
            _log.warning("an executor does not report", process=self._process.process_id, error=str(error))
            return None

    def refresh_load(self) -> None:
        """Request a report if the last one is too old for assignments."""
        if self.meter.is_due:
            self.report()

    def _report(self) -> Sessions:
        """Request and return a report. If the load comes from a report that is too old, update it from the new report.

        Raises:
            StartupError: the process does not answer.
        """
        report = self._process.status(_STATUS_SECONDS)
        if self.meter.is_due:
            self.meter.update(report)
        return report

    def send(self, order: Order) -> None:
        """Send an order to the process, or do nothing if the process has ended."""
        self._process.send(order)

    def drain(self, seconds: float) -> None:
        """Order the process to admit no session, and to end with its last session or after `seconds`. Return at once."""
        self._closing.set()
        self._process.send(Drain(seconds))

    def close(self, drain_seconds: float) -> None:
        """End the process, and wait for its end."""
        self._closing.set()
        self._process.close(drain_seconds)
        if self._watcher.is_alive():
            self._watcher.join()

    def _watch(self) -> None:
        while True:
            status = self._process.wait()
            self._state = "restarting"
            if self._closing.is_set():
                return
            death = {"process": self._process.process_id, "exit_status": status}
            _log.error("an executor died: its replacement recovers the sessions that have journals", **death)
            self._events.emit("executor_died", device=self.device_id, tenant=self._process.tenant, **death)
            if not self._restart():
                return

    def _restart(self) -> bool:
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS)
        while not self._closing.is_set():
            try:
                self._process = self._process.restart()
                self._process.wait_ready(self._start_timeout)
            except DjinnError as error:
                pause = backoff.pause()
                _log.error("cannot restart an executor: trying again later", error=str(error), next_try_seconds=pause)
                self._closing.wait(pause)
                continue
            if self._closing.is_set():  # `close` was called during the start, and has ended only the previous process
                self._process.close(0.0)
                return False
            self._restarted_at = time.monotonic()
            self._state = "ready"
            self.restarts += 1
            _log.info("an executor was restarted", process=self._process.process_id)
            self._events.emit("executor_restarted", device=self.device_id, process=self._process.process_id)
            return True
        return False


def _queue(report: Sessions) -> dict[str, int]:
    """Return a histogram of the times for which submissions waited for the device: counts by upper bound in seconds."""
    (distribution,) = report.metered.distributions.get("queue_duration_seconds", (Distribution((), (0,), 0.0),))
    return dict(zip((*map(str, distribution.bounds), "+Inf"), distribution.counts, strict=True))


def _figures(report: Sessions) -> Iterator[tuple[str, float]]:
    """Yield all metrics of a report by name. A metric with labels is summed."""
    metered = report.metered
    yield from metered.values.items()
    yield from ((name, sum(labelled.value for labelled in values)) for name, values in metered.labelled.items())


class Pool:
    """The executors that a gateway runs for one tenant, or holds in reserve for the next tenant."""

    def __init__(
        self,
        configs: Sequence[ExecutorConfig],
        start_timeout: float,
        events: ServerEvents = ServerEvents(),  # noqa: B008 - has no observers
        engine: ExecutorEngine = LocalEngine(),  # noqa: B008 - has no state
        requests: Sequence[LaunchRequest] = (),
    ) -> None:
        """Start all executors at the same time, without waiting for them.

        `engine`: starts their processes. `requests`: a launch request for each executor; empty: the engine ignores
        requests.

        Raises:
            StartupError: a process cannot be started.
            PluginError: the engine returned no `ExecutorHandle`.
        """
        self._executors: list[SupervisedExecutor] = []
        self._assignment_lock = threading.Lock()
        try:
            for number, config in enumerate(configs):
                request = requests[number] if requests else LaunchRequest(number, len(configs))
                self._executors.append(SupervisedExecutor(config, start_timeout, events, engine, request))
        except BaseException:
            self.close(0.0)
            raise

    def wait_ready(self) -> tuple[StartedExecutor, ...]:
        """Wait until all executors are ready.

        Raises:
            StartupError: an executor did not start; the message has the reason.
        """
        for supervised in self._executors:
            supervised.wait_ready()
        return tuple(supervised.launched for supervised in self._executors if supervised.launched is not None)

    def find(self, device: str) -> tuple[int, StartedExecutor] | Denial:
        """Return the number of a ready executor for `device`, and the executor; or a refusal.

        `device`: a number, an id or a kind; empty: any device.
        """
        candidates = self._candidates(device)
        return candidates if isinstance(candidates, Denial) else candidates[0]

    def assign(
        self,
        request: AssignmentRequest,
        assigner: Assigner = Assigner(),  # noqa: B008 - a frozen value
        other_pools: Sequence[tuple[str, Pool]] = (),
        *,
        counts: bool = True,
    ) -> tuple[int, StartedExecutor] | Denial:
        """Return the number of the executor for a new session, and the executor; or a refusal.

        The policy chooses only among executors whose devices have the kind and name of the first suitable device.

        Args:
            request: the new session. This method sets its `executors`.
            assigner: calls the policy.
            other_pools: names and pools of other tenants.
            counts: True if the session counts as load of the executor.
        """
        candidates = self._candidates(request.device)
        if isinstance(candidates, Denial):
            return candidates
        first = candidates[0][1].ready.device
        candidates_by_number = {
            number: executor
            for number, executor in candidates
            if (executor.ready.device.kind, executor.ready.device.name) == (first.kind, first.name)
        }
        if len(candidates_by_number) > 1:
            for number in candidates_by_number:
                self._executors[number].refresh_load()
        with self._assignment_lock:  # one client at a time: an assignment counts as load for the next
            loads = tuple(
                self._load(number, executor, other_pools) for number, executor in candidates_by_number.items()
            )
            choice = assigner.assign(attrs.evolve(request, executors=loads))
            if isinstance(choice, AssignmentRefusal):
                return Denial(choice.reason, BUSY if choice.retry else "device", choice.retry)
            if counts:
                self._executors[choice].meter.assign(request.hint)
        return choice, candidates_by_number[choice]

    def _load(self, number: int, executor: StartedExecutor, other_pools: Sequence[tuple[str, Pool]]) -> ExecutorLoad:
        other_loads = [(tenant, pool.executors[number].meter.load()) for tenant, pool in other_pools]
        loads = (TenantLoad(tenant, load.busy, load.sessions + load.beginning) for tenant, load in other_loads)
        present = tuple(load for load in loads if load.sessions)
        return attrs.evolve(
            self._executors[number].meter.load(), number=number, device=executor.ready.device.id, others=present
        )

    def _candidates(self, device: str) -> list[tuple[int, StartedExecutor]] | Denial:
        ready = [
            (n, supervised.launched) for n, supervised in enumerate(self._executors) if supervised.launched is not None
        ]
        full, free = "", []  # reason of a full executor; executors that admit sessions
        for number, executor in ready:
            if not device or device in {str(number), executor.ready.device.id, executor.ready.device.kind}:
                reason = executor.full()
                full = full or reason
                if not reason:
                    free.append((number, executor))
        if free:
            return free
        if full:
            return Denial(full, BUSY, retry=True)
        if len(ready) < len(self._executors):
            return Denial("an executor is being restarted after it died: try again in a few seconds", BUSY, retry=True)
        device_ids = ", ".join(executor.ready.device.id for _, executor in ready)
        return Denial(f"this server has no device {device!r}, it offers {device_ids}", "device")

    @property
    def devices(self) -> tuple[str, ...]:
        """Ids of the devices, in the order of their numbers, from the first reports of the executors."""
        return tuple(supervised.device_id for supervised in self._executors)

    @property
    def executors(self) -> tuple[SupervisedExecutor, ...]:
        """The executors, in the order of their numbers."""
        return tuple(self._executors)

    def close(self, drain_seconds: float) -> None:
        """Let sessions end for at most `drain_seconds`, then end all processes."""
        for supervised in self._executors:
            supervised.drain(drain_seconds)
        for supervised in self._executors:
            supervised.close(drain_seconds)
