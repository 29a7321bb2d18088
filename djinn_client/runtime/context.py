"""Client context: settings, plugins, open session, counters, and learnt data of a client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from djinn_client.interception.runtime_interface import port
from djinn_client.runtime.connecting.open import OpenSession
from djinn_client.runtime.observing import Observers
from djinn_client.runtime.planning.planner import Planner
from djinn_client.runtime.session import Session
from djinn_client.runtime.stats import Stats
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings

if TYPE_CHECKING:
    from djinn_client.hookspecs.integrations import Integration
    from djinn_core.ir.result import PipelineResult
    from djinn_core.registry.embedded_executors import EmbeddedExecutor

InitHook = Callable[[], None]


class Captures(threading.local):
    """Captures of the current thread. `latest`: the active or last `capture()`, as a `Captured`, or None."""

    latest: Any = None


class ClientContext(msgspec.Struct, eq=False):
    """State of a client. PyTorch knows one device, so a process has one context: `context`.

    The recorders' lock protects plans and sends.

    Attributes:
        overrides: settings that `djinn.configure` has set.
        settings: the settings in force, or None until they are resolved.
        registry: the plugins in use. Planning plugins are loaded when the first program is planned.
        started_executors: executors that no session uses yet.
        joining: numbers of executors that are starting for the open session.
        session: the open or lost session, or None.
        planner: planner of the session.
        kinds_to_load: kinds of plugins to load before the next program is sent.
        growth_intolerant_plugins: names of plugins that restrict the open session's plans to fewer sizes.
        stats: counters.
        first_storage: least number that a storage of the open session can have.
        baseline: totals of `_totals` at the last reset of the counters.
        ended_bytes: bytes that connections of earlier sessions have sent and received.
        hooks: functions to call when a session begins.
        integrated: integrations that were called, by name. They are never withdrawn.
        observers: the observers.
        recordings: lists that collect plans, of `record_plans`.
        captures: captures of each thread (`threading.local`).
        was_available: True once a server has answered since the settings last changed.
        lock: held while settings change, and while a session begins or ends.
    """

    overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    settings: Settings | None = None
    registry: Registry | None = None
    started_executors: tuple[EmbeddedExecutor, ...] = ()
    joining: set[int] = msgspec.field(default_factory=set)
    session: Session | None = None
    planner: Planner | None = None
    kinds_to_load: tuple[str, ...] = ()
    growth_intolerant_plugins: tuple[str, ...] = ()
    stats: Stats = msgspec.field(default_factory=Stats)
    first_storage: int = 0
    baseline: tuple[int, int, int, int] = (0, 0, 0, 0)
    ended_bytes: tuple[int, int] = (0, 0)
    hooks: list[InitHook] = msgspec.field(default_factory=list)
    integrated: dict[str, Integration] = msgspec.field(default_factory=dict)
    observers: Observers = msgspec.field(default_factory=Observers)
    recordings: list[list[PipelineResult]] = msgspec.field(default_factory=list)
    captures: Captures = msgspec.field(default_factory=Captures)
    was_available: bool = False
    lock: threading.RLock = msgspec.field(default_factory=threading.RLock)

    def __repr__(self) -> str:
        return object.__repr__(self)  # the overrides may contain a token

    def configured(self) -> tuple[Registry, Settings]:
        """Return the registry, with all plugins in use, and the settings of the open session."""
        assert self.registry is not None, "a session is open"
        assert self.settings is not None, "a session is open"
        return self.registry, self.settings

    @property
    def opened(self) -> tuple[OpenSession, ...]:
        """The session's executors, with the addresses in use."""
        session = self.session
        return () if session is None else tuple([executor.opened for executor in session.executors.current])

    @property
    def is_open(self) -> bool:
        """True while a session is open."""
        return self.session is not None and not self.session.lost and not port.forked

    def counters(self) -> Mapping[str, int]:
        """Return counters since the start or the last reset. Sizes are in bytes."""
        counts: dict[str, int] = msgspec.structs.asdict(self.stats)
        for plugin in self.growth_intolerant_plugins:
            counts[f"plans_for_sizes, {plugin}"] = counts["plans_for_sizes"]
        for member in self.opened:
            name = f"sessions, {member.url.partition(':')[0]}"  # the scheme of the transport that carries the data
            counts[name] = counts.get(name, 0) + 1
        names = ("ops_captured", "bytes_sent", "bytes_received", "ops_inferred")
        totals = zip(names, self._totals(), self.baseline, strict=True)
        return counts | {name: total - before for name, total, before in totals}

    def _totals(self) -> tuple[int, int, int, int]:
        bytes_sent, bytes_received = self.ended_bytes
        for member in self.opened:
            bytes_sent += member.connection.bytes_sent
            bytes_received += member.connection.bytes_received
        ops_captured, ops_inferred = port.interception.ops() if self.settings is not None else (0, 0)
        return ops_captured, bytes_sent, bytes_received, ops_inferred

    def reset_counters(self) -> None:
        """Reset all counters to zero."""
        zeros = Stats()
        for name in Stats.__struct_fields__:
            setattr(self.stats, name, getattr(zeros, name))
        self.baseline = self._totals()


context: Final = ClientContext()  # The context of this process: PyTorch knows one device per process.
