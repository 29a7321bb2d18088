"""The one place with state: what is configured, which session is open, and what to do when the process ends."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import msgspec

from djinn_core.config import Settings, resolve
from djinn_core.errors import DjinnError, ForkedProcess, SessionLost
from djinn_core.hookspecs.interception import Interceptor
from djinn_core.hookspecs.observers import Observer
from djinn_core.interception import ending, sync
from djinn_core.interception.dispatch import forget_calls, forget_what_was_learnt
from djinn_core.interception.install import install
from djinn_core.interception.port import Runtime, port
from djinn_core.interception.recording import recorder
from djinn_core.interception.recording.collecting import collect_later
from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import ProgramGraph
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult
from djinn_core.logs import get_logger, set_debug_level
from djinn_core.pipeline import tolerate_growth
from djinn_core.plugins.registry import Registry
from djinn_core.runtime.client_fallback import ClientFallback
from djinn_core.runtime.connect import Opened, open_connections, start_executors
from djinn_core.runtime.earlier import EarlierPrograms
from djinn_core.runtime.meaning import tell_meaning
from djinn_core.runtime.observing import Observers
from djinn_core.runtime.planner import Planner
from djinn_core.runtime.planning import NOTHING_LEFT_OUT, NOWHERE, load_plugins, plan_for_pool, plan_program
from djinn_core.runtime.pool.opening import open_pool
from djinn_core.runtime.pool.planner import Whereabouts
from djinn_core.runtime.pool.session import PoolSession
from djinn_core.runtime.progress import progress_observers
from djinn_core.runtime.session import Session
from djinn_core.runtime.stats import Stats
from djinn_core.runtime.template import Prepared
from djinn_core.runtime.trials import Without, judge_among
from djinn_core.runtime.whole_programs import WholePrograms
from djinn_core.wire.messages import DeviceInfo

log = get_logger("djinn.client")

InitHook = Callable[[], None]


@attrs.define
class _State:
    overrides: dict[str, Any] = attrs.field(factory=dict, repr=False)  # a token may be among them
    settings: Settings | None = None
    registry: Registry | None = None
    opened: tuple[Opened, ...] = ()
    session: Session | PoolSession | None = None
    stats: Stats = attrs.field(factory=Stats)
    baseline: tuple[int, int, int] = (0, 0, 0)
    closed: tuple[int, int] = (0, 0)  # bytes that connections of former sessions have sent and received
    hooks: list[InitHook] = attrs.field(factory=list)
    intercepting: dict[str, Interceptor] = attrs.field(factory=dict)
    observers: Observers = attrs.field(factory=Observers)
    recordings: list[list[PipelineResult]] = attrs.field(factory=list)
    wholes: WholePrograms = attrs.field(factory=WholePrograms)
    earlier: EarlierPrograms = attrs.field(factory=EarlierPrograms)
    planner: Planner | None = None
    forked: bool = False


_state = _State()
_lock = threading.RLock()


def configure(
    plugins: Any = None,
    servers: Any = None,
    token: str | None = None,
    connection_file: Any = None,
    **settings: Any,
) -> None:
    """Set what differs from the environment and the configuration file.

    Args:
        plugins: names, modules or objects: the built-ins plus exactly these. None: everything that is installed.
        servers: URLs of servers, such as `["tcp://gpu-box:5556"]`. None: an executor on this machine.
        token: what the servers ask for.
        connection_file: a file that `djinn serve` wrote, in place of `servers` and `token`.
        **settings: any other field of `Settings`.

    Configuring ends a session that is open: its tensors are lost.

    Raises:
        ConfigurationError: a setting is unknown or malformed.
        PluginError: a plugin that is named cannot be used.
    """
    named = {"plugins": plugins, "servers": servers, "token": token, "connection_file": connection_file}
    overrides = {**{k: v for k, v in named.items() if v is not None}, **settings}
    resolved = resolve(overrides).settings
    registry = load_plugins(resolved)
    with _lock:
        shut_down()
        _state.overrides = overrides
        _apply(resolved, registry)


def _apply(settings: Settings, registry: Registry) -> None:
    _state.settings, _state.registry = settings, registry
    _intercept({interceptor.name: interceptor for interceptor in registry.interceptors})
    _state.observers = Observers([*registry.observers, *progress_observers(settings.progress)])
    port.checkpoint_instructions = settings.checkpoint_instructions
    port.fallback = ClientFallback(_state.stats) if settings.client_fallback else None
    if settings.client_fallback:
        forget_calls()
    if settings.debug:
        set_debug_level(settings.debug)


def _intercept(wanted: Mapping[str, Interceptor]) -> None:
    """Install those that are wanted now, and uninstall those that are not any more."""
    for name in _state.intercepting.keys() - wanted.keys():
        _state.intercepting.pop(name).uninstall()
    for name, interceptor in wanted.items():
        if name not in _state.intercepting:
            interceptor.install()
            _state.intercepting[name] = interceptor


def settings() -> Settings:
    """What is in force."""
    _load()
    assert _state.settings is not None
    return _state.settings


def registry() -> Registry:
    """The plugins that are in use."""
    _load()
    assert _state.registry is not None
    return _state.registry


def _load() -> None:
    if _state.settings is not None and _state.registry is not None:
        return
    with collect_later, _lock:
        if _state.settings is None:
            resolved = resolve(_state.overrides).settings
            _apply(resolved, load_plugins(resolved))


def init() -> None:
    """Connect now, instead of at the first use of the device; once, however many threads ask.

    A session that was lost is replaced by a new one.

    Raises:
        StartupError: the embedded executor does not start.
        TransportError: no server can be reached.
        AccessRefused: the server does not accept the token.
    """
    _session()


def _session() -> Session | PoolSession:
    if _state.forked:
        raise ForkedProcess
    if ending.has_begun():
        raise SessionLost("the program is ending, and its session has ended: use tensors before, or use atexit")
    session = _state.session
    if session is not None and not session.lost:
        return session
    # Finalizers that use the device must not begin a second session in the middle of this.
    with collect_later, _lock:
        session = _state.session
        if session is not None and not session.lost:
            return session
        session = _open()
        hooks = list(_state.hooks)
    # Without the lock: hooks may use the device, also from threads that they start.
    for hook in hooks:
        hook()
    return session


def _open() -> Session | PoolSession:
    if _state.session is not None:
        _end_session()
    opened = _connect()
    try:
        session = _new_session(opened)
    except BaseException:
        for one in opened:
            one.close()
        raise
    _state.opened, _state.session = opened, session
    if isinstance(session, PoolSession):
        port.whole_programs += 1  # where a program runs is decided over all of it
    log.info("connected", server=session.server, session=session_name())
    kinds = tuple(one.attached.device.kind for one in opened)
    _state.observers.tell("connected", server=session.server, fallbacks=opened[0].fallbacks, kinds=kinds)
    return session


def _new_session(opened: tuple[Opened, ...]) -> Session | PoolSession:
    if len(opened) > 1:
        return open_pool(opened, settings(), _planner(), _plan_for_pool, _state.stats, _state.observers)
    (only,) = opened
    attached = only.attached
    return Session(
        only.connection,
        _planner(),
        _state.stats,
        only.url,
        _state.observers,
        attached.recalls,
        attached.codings,
    )


def _connect() -> tuple[Opened, ...]:
    # The executors start while plugins are loaded.
    executors = start_executors(_state.settings or resolve(_state.overrides).settings)
    try:
        return open_connections(settings(), registry(), executors)
    except BaseException:
        for executor in executors:
            executor.close(0.0)
        raise


def _runtime() -> Runtime:
    """For interception: the session that is open; a lost one stays lost until `init()`."""
    return _state.session if _state.session is not None and not _state.forked else _session()


async def init_async() -> None:
    """`init()` without blocking the event loop."""
    import asyncio

    await asyncio.to_thread(init)


def register_init_hook(hook: InitHook) -> None:
    """Call `hook` after each time a session begins; at once if one is open."""
    with _lock:
        _state.hooks.append(hook)
        is_open = is_initialized()
    if is_open:
        hook()


def is_initialized() -> bool:
    """Whether a session is open."""
    return _state.session is not None and not _state.session.lost and not _state.forked


def shut_down() -> None:
    """End the session and, where it is the embedded default, its executor. Its tensors are lost."""
    with collect_later, _lock:
        if _state.session is not None and not _state.forked:
            _end_session()


def _end_session() -> None:
    """End the session, lost or not; what was recorded for it is dropped."""
    session, _state.session = _state.session, None
    opened, _state.opened = _state.opened, ()
    assert session is not None
    port.whole_programs -= isinstance(session, PoolSession)
    session.close()
    recorder.drop_everything()
    forget_what_was_learnt()
    _state.observers.tell("disconnected", server=session.server)
    _state.closed = (
        _state.closed[0] + sum(one.connection.bytes_sent for one in opened),
        _state.closed[1] + sum(one.connection.bytes_received for one in opened),
    )
    for one in opened:
        if one.executor is not None:
            one.executor.close(0.0)  # nobody waits for what it is still at


def synchronize() -> None:
    """Send everything that was recorded and wait until the devices have finished it.

    Raises:
        RemoteError: an op failed since the last sync point.
    """
    sync.synchronize()


def device() -> DeviceInfo | None:
    """The physical device of the open session, the first where there are several; None where there is none."""
    return _state.opened[0].attached.device if _state.opened else None


def pool_topology() -> NetworkTopology | None:
    """The devices behind the open session, and the links between them, where there are several."""
    return _state.session.topology if isinstance(_state.session, PoolSession) else None


def session_name() -> str:
    """Name of the open session; empty where there is none."""
    return _state.opened[0].attached.session if _state.opened else ""


def queue_seconds() -> float:
    """Seconds that a submission waited for its turn on the device, on average since the counters were reset."""
    return _state.stats.server_queue_us / 1e6 / max(1, _state.stats.submissions)


def executor_process() -> int:
    """Process number of the (first) executor of the open session, on its machine; 0 where there is none."""
    return _state.opened[0].attached.process if _state.opened else 0


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """`observer` is told of events inside the block, as those of plugins are."""
    with _state.observers.joined_by(observer):
        yield


def _device_count() -> int:
    """How many logical devices there are: all executors as one, and each of several by itself."""
    several = len(_state.opened) or (1 if _named_servers() else _resolved().executors)
    return 1 + several if several > 1 else 1


def _named_servers() -> bool:
    settings = _resolved()
    return bool(settings.servers or settings.connection_file)


def _resolved() -> Settings:
    """The settings, without the plugins that they select: `torch.manual_seed` asks how many devices there are."""
    return _state.settings or resolve(_state.overrides).settings


def _described(index: int) -> tuple[str, DeviceInfo]:
    """The open session's name, and the device of an index; of all executors the first, with the memory of all."""
    assert _state.opened
    infos = [one.attached.device for one in _state.opened]
    if index:
        return session_name(), infos[index - 1]
    memory, free = sum(i.memory for i in infos), sum(i.memory_free for i in infos)
    return session_name(), msgspec.structs.replace(infos[0], memory=memory, memory_free=free)


def _planner() -> Planner:
    """A session's planner; what is known of whole programs and of their values begins anew with it."""
    _state.wholes = WholePrograms()
    exact, judge = not tolerate_growth(registry(), settings().exact), judge_among(registry().optimizations)
    _state.planner = Planner(_plan, _state.stats, _planned, exact, judge)
    _state.earlier = EarlierPrograms(_state.planner.recent)
    return _state.planner


def _planned(prepared: Prepared, program: Program) -> None:
    _state.wholes.named(prepared)
    profile = _state.earlier.latest
    _state.earlier.planned(prepared, program)
    if profile is not None and isinstance(_state.session, Session) and _state.opened[0].attached.device.spill:
        tell_meaning(_state.session, prepared, program, profile)


def last_profile() -> WorkloadProfile | None:
    """What the program is about that was sent last, as a whole; None where nothing was sent in this session.

    Found without analysing anything: a program that came before is known, also where it is sent in pieces. Facts in matches,
    such as the number of keys, and value ids are those of the program when it came first.
    """
    if isinstance(_state.session, PoolSession):
        return _state.session.last_profile
    recent = _state.planner.recent if _state.planner is not None else None
    return _state.wholes.profile_of(recent[-1][0]) if recent else None


def _plan(program: Program, without: Without = NOTHING_LEFT_OUT) -> PipelineResult:
    started = time.monotonic()
    profile = _state.wholes.piece(program)
    known = _state.earlier.residency(program) if profile is None else {}
    place = (registry(), settings(), device() or NOWHERE)
    result = plan_program(program, *place, profile=profile, known=known, without=without)
    about = result.recorded or result.profile
    assert about is not None
    if profile is None:
        _state.wholes.remember(program, about)
    _state.earlier.about(about)
    _state.observers.tell("planned", instructions=len(program), duration=time.monotonic() - started)
    for recording in _state.recordings:
        recording.append(result)
    return result


def switched_off(program: Program | ProgramGraph) -> Without:
    """Optimizations that were found not to pay for such a program in this session, each with the reason."""
    return _state.planner.verdicts.about(program) if _state.planner is not None else NOTHING_LEFT_OUT


def _plan_for_pool(graph: ProgramGraph, where: Whereabouts, topology: NetworkTopology) -> PipelineResult:
    started = time.monotonic()
    known = (where.resident, where.copies, where.stream, where.derived, where.occupied, where.known)
    result = plan_for_pool(graph, registry(), settings(), topology, *known)
    _state.observers.tell("planned", instructions=len(graph.program), duration=time.monotonic() - started)
    for recording in _state.recordings:
        recording.append(result)
    return result


@contextmanager
def record_plans() -> Iterator[list[PipelineResult]]:
    """Collects the result of every plan that is made meanwhile, of programs as they are and not in pieces."""
    recording: list[PipelineResult] = []
    _state.recordings.append(recording)
    port.whole_programs += 1
    try:
        yield recording
    finally:
        port.whole_programs -= 1
        _state.recordings.remove(recording)


def stats() -> Mapping[str, int]:
    """Counters since the start or the last reset; sizes in bytes."""
    counts = {k: int(v) for k, v in attrs.asdict(_state.stats).items() if k != "server_seconds"}
    captured, sent, received = _totals()
    before = _state.baseline
    return counts | {
        "ops_captured": captured - before[0],
        "bytes_sent": sent - before[1],
        "bytes_received": received - before[2],
    }


def _totals() -> tuple[int, int, int]:
    sent, received = _state.closed
    for one in _state.opened:
        sent, received = sent + one.connection.bytes_sent, received + one.connection.bytes_received
    return port.ops_captured, sent, received


def reset_stats() -> None:
    """Start counting from zero."""
    fresh = Stats()
    for field in attrs.fields(Stats):
        setattr(_state.stats, field.name, getattr(fresh, field.name))
    _state.baseline = _totals()


def _after_fork() -> None:
    """A child shares neither the session nor the programs of its parent: it is inert, and must not write to the socket.

    Where the parent had no session yet, the child is a client of its own.
    """
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    _state.forked = port.forked = _state.forked or _state.session is not None
    if _state.forked:
        # Sockets and processes of the parent's: finalizing them here, at whatever moment the interpreter ends, would warn.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_state.opened))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_state.session))
    recorder.forget_everything()


def _at_exit() -> None:
    ending.begin()
    try:
        shut_down()
    except DjinnError as error:
        log.debug("shutting down", reason=str(error))
    ending.settle()


def attach() -> None:
    """Register the device and become its runtime; called once, when `djinn` is imported by a client."""
    install()
    port.start = _runtime
    port.is_open = is_initialized
    port.describe = _described
    port.device_count = _device_count
    port.counts_when_open = lambda: not is_initialized() and _named_servers()
    os.register_at_fork(after_in_child=_after_fork)
    atexit.register(_at_exit)
