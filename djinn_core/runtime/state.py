"""Global state of the client: settings, the open session, and what was learnt in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from djinn_core.config import Settings
from djinn_core.hookspecs.interception import Interceptor
from djinn_core.ir.result import PipelineResult
from djinn_core.plugins.registry import Registry
from djinn_core.runtime.connecting.opened import Opened
from djinn_core.runtime.observing import Observers
from djinn_core.runtime.planning.planner import Planner
from djinn_core.runtime.planning.program_index import WholePrograms
from djinn_core.runtime.planning.residency_history import EarlierPrograms
from djinn_core.runtime.pool.session import PoolSession
from djinn_core.runtime.session import Session
from djinn_core.runtime.stats import Stats

InitHook = Callable[[], None]


@attrs.define
class ClientState:
    """Of this process."""

    overrides: dict[str, Any] = attrs.field(factory=dict, repr=False)  # a token may be among them
    settings: Settings | None = None
    registry: Registry | None = None
    opened: tuple[Opened, ...] = ()
    session: Session | PoolSession | None = None
    asked_by_size: tuple[str, ...] = ()  # plugins with which plans of the open session hold for fewer sizes
    stats: Stats = attrs.field(factory=Stats)
    first_storage: int = 0  # storages of the open session have numbers above those of former ones
    baseline: tuple[int, int, int, int] = (0, 0, 0, 0)
    closed: tuple[int, int] = (0, 0)  # bytes that connections of former sessions have sent and received
    hooks: list[InitHook] = attrs.field(factory=list)
    intercepting: dict[str, Interceptor] = attrs.field(factory=dict)
    observers: Observers = attrs.field(factory=Observers)
    recordings: list[list[PipelineResult]] = attrs.field(factory=list)
    wholes: WholePrograms = attrs.field(factory=WholePrograms)
    earlier: EarlierPrograms = attrs.field(factory=EarlierPrograms)
    planner: Planner | None = None
    forked: bool = False
    answered: bool = False  # a server has, since it was configured


state = ClientState()
