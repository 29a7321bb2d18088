"""Client API of the process: the current context, with its settings and open session; clean-up at exit and after a fork."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from djinn_client.interception import interpreter_shutdown, sync
from djinn_client.interception.device.numeric_settings import require_exact
from djinn_client.interception.dispatch import forget_calls, forget_what_was_learnt
from djinn_client.interception.install import install
from djinn_client.interception.recording.recorder import recorders
from djinn_client.interception.runtime_interface import Runtime, RuntimeFunctions, port
from djinn_client.runtime.client_session import ClientSession
from djinn_client.runtime.connecting.connect import missing_operators, open_connections
from djinn_client.runtime.connecting.open_session import OpenSession
from djinn_client.runtime.context import ClientContext, InitHook
from djinn_client.runtime.integrations import integrate_registered
from djinn_client.runtime.load_plugins import open_plugins
from djinn_client.runtime.planning import session_planner
from djinn_client.runtime.planning.ab_tests import Without
from djinn_client.runtime.reconfiguring import (
    PLANNING,
    PLUGINS,
    changed,
    executor_plugins_differ,
    live_tensors,
    needing_new_session,
)
from djinn_client.runtime.sending.progress import progress_observers
from djinn_client.runtime.session import Session
from djinn_client.tracebacks import for_users
from djinn_core.errors import ConfigurationError, DjinnError, ForkedProcess, SessionLost
from djinn_core.hookspecs.observers import Observer
from djinn_core.ir.handles import new_storage
from djinn_core.ir.program import Program
from djinn_core.ir.short_repr import ShortRepr
from djinn_core.logs import get_logger, set_debug_level
from djinn_core.observing import Sink
from djinn_core.registry.embedded_executors import LOCAL
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings, resolve
from djinn_core.system.gc_pause import collect_later
from djinn_core.wire.messages import DeviceInfo

# What executors of this program's own, pools and plans need is imported where a session has them.
if TYPE_CHECKING:
    from djinn_client.runtime.pool.pool_session import PoolSession
    from djinn_core.ir.costs import NetworkTopology
    from djinn_core.ir.graph import ProgramGraph
    from djinn_core.ir.profile import WorkloadProfile
    from djinn_core.ir.result import PipelineResult
    from djinn_core.registry.embedded_executors import EmbeddedExecutor

__all__ = [
    "cancel",
    "configure",
    "device",
    "executor_process",
    "init",
    "init_async",
    "is_initialized",
    "last_profile",
    "observed_by",
    "pool_topology",
    "queue_seconds",
    "record_plans",
    "register_init_hook",
    "registry",
    "reset_stats",
    "session_name",
    "settings",
    "shut_down",
    "stats",
    "switched_off",
    "synchronize",
    "whole_programs",
]

FINISH_SECONDS: Final = 60.0  # that a program waits at its end for its own executors to write files
log = get_logger("djinn.client")

context = ClientContext()  # of this process: PyTorch knows one device


@for_users
def configure(
    plugins: Any = None,
    servers: Any = None,
    token: str | None = None,
    connection_file: Any = None,
    **settings: Any,
) -> None:
    """Set what differs from the environment and the configuration file.

    Args:
        plugins: names, modules or objects: the built-ins plus exactly these. None: as before.
        servers: URLs of servers, such as `["tcp://gpu-box:5556"]`.
        token: what the servers ask for.
        connection_file: a file that `djinn serve` wrote, in place of `servers` and `token`.
        **settings: any other field of `Settings`; `plugin_settings` is a dict by plugin, `{"my_plugin": {"its_setting": 32}}`.

    What was set before stays as it was set; without arguments, nothing is set any more. While a session is open, settings
    that it can take over hold at once. Others need a new session: where this one holds tensors, nothing is changed and
    `ConfigurationError` is raised; where it holds none, it ends, with a warning, and the next use begins another.

    Raises:
        ConfigurationError: a setting is unknown or malformed, or needs a new session while this one holds tensors.
        PluginError: a plugin that is named cannot be used.
    """
    named = {"plugins": plugins, "servers": servers, "token": token, "connection_file": connection_file}
    given = {**{k: v for k, v in named.items() if v is not None}, **settings}
    with context.lock:
        overrides = _merged(context.overrides, given) if given else {}
        resolved = resolve(overrides).settings
        registry = open_plugins(resolved)
        if is_initialized():
            _reconfigure(resolved, registry)
        else:
            shut_down()  # one that was lost
            _apply(resolved, registry)
        context.overrides = overrides


def _merged(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge new settings into those set before; tables of plugin settings are merged as well."""
    old, new = before.get("plugin_settings"), given.get("plugin_settings")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return {**before, **given}
    merged = {name: {**old.get(name, {}), **new.get(name, {})} for name in {**old, **new}}
    return {**before, **given, "plugin_settings": merged}


def _reconfigure(resolved: Settings, registry: Registry) -> None:
    """Change what the open session can take over, or end it where it holds no tensors and cannot take over all."""
    in_use, before = context.configured()
    names = changed(before, resolved)
    restarting = needing_new_session(names, before, executor_plugins_differ(in_use, registry, before))
    if restarting:
        _end_unless_held(", ".join(sorted(restarting)))
    elif not names & PLUGINS:
        registry = in_use  # its observers may have state
    _apply(resolved, registry)
    if not restarting and names & (PLANNING | PLUGINS):
        session_planner.plan_anew(context)
    if names and not restarting:
        log.info("the open session goes on with other settings", settings=sorted(names))


def _end_unless_held(names: str) -> None:
    """End the session for the settings `names`.

    Raises:
        ConfigurationError: it holds tensors, which would be lost.
    """
    held = live_tensors(context.first_storage)
    if held:
        raise ConfigurationError(
            f"djinn.configure() has changed nothing: {names} cannot change in an open session, and this one holds "
            f"{held} tensor{'s' if held > 1 else ''}, which would be lost. Configure before the first use of the device, or "
            "call djinn.shut_down() first, which ends the session; djinn.init() or the next use of the device begins another"
        )
    shut_down()
    log.warning(
        "djinn.configure() has ended the session, which held no tensors: the next use of the device begins another, whose "
        "random state begins again",
        changed=names,
    )


def _apply(settings: Settings, registry: Registry) -> None:
    if context.settings is not None and settings != context.settings:
        _stop_early()
    context.settings, context.registry = settings, registry
    install()  # where the client is used without `import djinn`
    integrate_registered(context, registry)
    sinks = [Sink(one, registry.owner("observers", one.name)) for one in registry.observers]
    context.observers.become([*sinks, *map(Sink, progress_observers(settings.progress))])
    port.checkpoint_instructions = settings.checkpoint_instructions
    port.wait_timeout = settings.wait_timeout
    require_exact(settings.exact)
    port.fallback = None
    if settings.client_fallback:
        from djinn_client.runtime.client_fallback import ClientFallback

        port.fallback = ClientFallback(context.stats)
    if settings.client_fallback or context.session is None:
        forget_calls()
    if settings.debug:
        set_debug_level(settings.debug)
    context.answered, port.prepare = False, _prepare


def settings() -> Settings:
    """The settings in force."""
    _load()
    assert context.settings is not None
    return context.settings


def registry() -> Registry:
    """The plugins that are in use."""
    _load()
    return context.configured()[0]


def _load() -> None:
    if context.settings is not None and context.registry is not None:
        return
    with collect_later, context.lock:
        if context.settings is None:
            resolved = resolve(context.overrides).settings
            _apply(resolved, open_plugins(resolved))


@for_users
def init() -> None:
    """Connect now, instead of at the first use of the device; once, however many threads ask.

    A session that was lost is replaced by a new one.

    Raises:
        StartupError: the embedded executor does not start.
        TransportError: no server can be reached.
        AccessRefused: the server does not accept the token.
    """
    _session()


def _session() -> ClientSession:
    if port.forked:
        raise ForkedProcess
    if interpreter_shutdown.has_begun():
        raise SessionLost("the program is ending, and its session has ended: use tensors before, or use atexit")
    session = context.session
    if session is not None and not session.lost:
        return session
    # Finalizers that use the device must not begin a second session in the middle of this.
    with collect_later, context.lock:
        session = context.session
        if session is not None and not session.lost:
            return session
        session = _open()
        hooks = list(context.hooks)
    # Without the lock: hooks may use the device, also from threads that they start.
    if _resolved().engine != LOCAL and any(one.executor is not None for one in context.opened):
        from djinn_client.runtime import drained_nodes  # not needed otherwise

        drained_nodes.watch()
    for hook in hooks:
        hook()
    return session


def _open() -> ClientSession:
    if context.session is not None:
        _end_session()
    began = time.perf_counter()
    opened = _connect()
    try:
        session = _new_session(opened)
    except BaseException:
        for one in opened:
            one.close()
        raise
    context.opened, context.session = opened, session
    port.missing = missing_operators(opened)
    if port.missing:
        forget_calls()  # also those that were recorded before there was a server
        _warn_of_missing(port.missing)
    log.info("connected", server=session.server, session=session_name())
    kinds = tuple(one.attached.device.kind for one in opened)
    facts = {"server": session.server, "fallbacks": opened[0].fallbacks, "kinds": kinds}
    context.observers.tell("connected", **facts, seconds=time.perf_counter() - began)
    return session


def _warn_of_missing(missing: Mapping[str, str]) -> None:
    """Warn of ops that were recorded before there was a server and that it lacks; later ones are refused when they are recorded."""
    latest = context.captures.latest
    recorded = {entry.call.op for recorder in recorders.all() for entry in recorder.entries}
    recorded.update(call.op for call in (latest.program.calls if latest is not None else ()))
    for name in sorted(recorded & missing.keys()):
        log.warning("a recorded program needs an op that a server lacks", op=name, server=missing[name])


def new_pool(opened: tuple[OpenSession, ...], only: Session | None = None) -> PoolSession:
    """A session over several executors. `only`: the session with the first of them, which was the only one so far.

    Raises: as `open_pool`.
    """
    from djinn_client.runtime.planning.plan_maker import plan_in_pool
    from djinn_client.runtime.pool.opening import open_pool

    plan = partial(plan_in_pool, context)
    planner = session_planner.new_planner(context, len(opened))
    pool = open_pool(opened, settings(), planner, plan, context.stats, context.observers, only)
    calibrate(pool, opened)
    return pool


def calibrate(pool: PoolSession, opened: tuple[OpenSession, ...]) -> None:
    """Measure devices of a pool that were never measured, in the background."""
    from djinn_client.runtime.planning.first_calibration import calibrate_in_background

    calibrate_in_background(opened, settings(), registry().cost_models, partial(_measured, pool))


def _new_session(opened: tuple[OpenSession, ...]) -> ClientSession:
    if len(opened) > 1:
        return new_pool(opened)
    (only,) = opened
    attached = only.attached
    return Session(
        only.connection,
        session_planner.new_planner(context, 1),
        context.stats,
        only.url,
        context.observers,
        caches_weights=attached.caches_weights,
        compressions=only.compressions,
        weight_sources=attached.weight_sources,
        called=only.server,
    )


def _measured(pool: PoolSession) -> None:
    """Plan with what was measured of the devices of a session, if it is still open."""
    with recorders.sending:
        if context.session is pool and not port.forked:
            from djinn_client.runtime.pool.executors import capabilities_named

            pool.know_devices(capabilities_named(context.opened, pool.membership.present))


def start_early() -> None:
    """Start the executors that a session of this program will need, if they are its own, beside what it does next.

    Where one cannot be started, the first wait says so.
    """
    with context.lock:
        if context.starting or context.session is not None or port.forked:
            return
        try:
            context.starting = _own_executors()
        except DjinnError as error:
            log.debug("no executor was started early", reason=str(error))


def _own_executors() -> tuple[EmbeddedExecutor, ...]:
    """Return the executors of this program on this machine, started now or by `import djinn`; none if a server or an engine has them."""
    now = _resolved()
    taken: tuple[EmbeddedExecutor, ...] = port.early.take(now) if port.early is not None else ()
    if taken:
        return taken
    if _named_servers():
        return ()
    from djinn_client.runtime.connecting.starting import start_executors

    return start_executors(now) if now.engine == LOCAL else ()


def _stop_early() -> None:
    """End executors that were started and that no session has taken."""
    executors, context.starting = context.starting, ()
    for executor in executors:
        executor.close(0.0)


def _connect() -> tuple[OpenSession, ...]:
    # The executors start while plugins are loaded, or have started before, unless a plugin starts them.
    executors, context.starting = context.starting, ()
    executors = executors or _own_executors()
    try:
        opened = open_connections(settings(), registry(), executors)
    except BaseException:
        for executor in executors:
            executor.close(0.0)
        raise
    if executors and port.early is not None:
        port.early.note(settings())
    return opened


def _runtime() -> Runtime:
    """For interception: the session that is open; a lost one stays lost until `init()`."""
    return context.session if context.session is not None and not port.forked else _session()


async def init_async() -> None:
    """`init()` without blocking the event loop."""
    import asyncio

    await asyncio.to_thread(init)


@for_users
def register_init_hook(hook: InitHook) -> None:
    """Call `hook` after each time a session begins; at once if one is open."""
    with context.lock:
        context.hooks.append(hook)
        is_open = is_initialized()
    if is_open:
        hook()


def is_initialized() -> bool:
    """True while a session is open."""
    return context.session is not None and not context.session.lost and not port.forked


@attrs.frozen(repr=False)
class RuntimeState(ShortRepr):
    """State of the client.

    Attributes:
        initialized: whether a session is open.
        servers: what messages call the servers of the session, in the order of the devices.
        devices: their physical devices.
        plugins: names of the plugins in use.
        stats: counters, as `djinn.stats()` gives them.
    """

    initialized: bool
    servers: tuple[str, ...]
    devices: tuple[DeviceInfo, ...]
    plugins: tuple[str, ...]
    stats: Mapping[str, int]


@for_users
def get_runtime_state() -> RuntimeState:
    """The state of the client, without connecting it."""
    opened = context.opened if is_initialized() else ()
    return RuntimeState(
        initialized=is_initialized(),
        servers=tuple([one.server for one in opened]),
        devices=tuple([one.now.device for one in opened]),
        plugins=tuple([row.name for row in registry().rows if row.status == "active"]),
        stats=stats(),
    )


@for_users
def shut_down() -> None:
    """End the session and, where it is the embedded default, its executor. Its tensors are lost."""
    with collect_later, context.lock:
        if context.session is not None and not port.forked:
            _end_session()
        _stop_early()


def _end_session() -> None:
    """End the session, lost or not; what was recorded for it is dropped."""
    session, context.session = context.session, None
    opened, context.opened = context.opened, ()
    assert session is not None
    finish = not session.lost and session.changes_files  # by another thread, or by a call that Ctrl-C interrupted
    session.close(finish=finish)
    recorders.drop_everything()
    forget_what_was_learnt()
    port.missing = {}
    context.first_storage = new_storage()
    context.observers.tell("disconnected", server=session.server)
    context.closed = (
        context.closed[0] + sum(one.connection.bytes_sent for one in opened),
        context.closed[1] + sum(one.connection.bytes_received for one in opened),
    )
    for one in opened:
        if one.executor is not None:
            one.executor.close(FINISH_SECONDS if finish else 0.0)  # no thread waits for the rest of its work
    session_planner.save_plans(context)
    context.plans = None


@for_users
def synchronize() -> None:
    """Send everything that was recorded and wait until the devices have finished it.

    Raises:
        RemoteError: an op failed since the last sync point.
    """
    sync.synchronize()


def cancel(thread: threading.Thread | None = None) -> None:
    """Cancel this program's unanswered submissions, from any thread; with `thread`, only those of that thread.

    Waits for them raise `ProgramStopped` within a tenth of a second. Executors stop between two ops, within half a second.
    Values that the stopped work was to make or write raise `ProgramStopped` when they are used. All other values and the
    session stay usable, and what threads record afterwards runs as usual.
    """
    session = context.session
    if session is not None and not session.lost and not port.forked:
        session.cancel(None if thread is None else thread.ident or 0)


def device() -> DeviceInfo | None:
    """The physical device of the open session, the first where there are several; None if there is none."""
    return context.opened[0].attached.device if context.opened else None


def pool_topology() -> NetworkTopology | None:
    """The devices behind the open session, and the links between them, where there are several."""
    return context.session.topology if context.session is not None else None


def session_name() -> str:
    """Name of the open session; empty if there is none."""
    return context.opened[0].now.session if context.opened else ""


def last_profile() -> WorkloadProfile | None:
    """Profile of the whole program that was sent last; None if nothing was sent in this session.

    Found without analysing anything: a program that came before is known, also where it is sent in pieces. Facts in matches,
    such as the number of keys, and value ids are those of the program when it came first.
    """
    return context.session.last_profile if context.session is not None else None


def record_plans() -> AbstractContextManager[list[PipelineResult]]:
    """Collects the result of every plan that is made inside the block, of programs as they are and not in pieces."""
    return session_planner.record_plans(context)


def whole_programs() -> AbstractContextManager[None]:
    """Sends programs whole inside the block, and not in pieces while they are recorded."""
    return session_planner.whole_programs()


def switched_off(program: Program | ProgramGraph) -> Without:
    """Optimizations that were found not to pay for such a program in this session, each with the reason."""
    return session_planner.switched_off(context, program)


def stats() -> Mapping[str, int]:
    """Counters since the start or the last reset; sizes in bytes.

    Plugins with which plans hold for fewer sizes are named beside `plans_for_sizes`.
    """
    return context.counters()


def reset_stats() -> None:
    """Start counting from zero."""
    context.reset_counters()


def queue_seconds() -> float:
    """Seconds that a submission waited for its turn on the device, on average since the counters were reset."""
    return context.stats.server_queue_us / 1e6 / max(1, context.stats.submissions)


def executor_process() -> int:
    """Process number of the (first) executor of the open session, on its machine; 0 if there is none."""
    return context.opened[0].process if context.opened else 0


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """`observer` is told of events inside the block, as those of plugins are."""
    with context.observers.joined_by(observer):
        yield


def _device_count() -> int:
    """Number of logical devices: all executors as one, and each of several by itself."""
    session = context.session
    if session is not None and session.membership is not None:
        several = len(session.membership.members)  # also those that have left, whose indexes stand for others
    else:
        several = len(context.opened) or (1 if _named_servers() else _resolved().executors)
    return 1 + several if several > 1 else 1


def _named_servers() -> bool:
    settings = _resolved()
    return bool(settings.servers or settings.connection_file)


def _resolved() -> Settings:
    """The settings, without the plugins that they select: `torch.manual_seed` asks how many devices there are."""
    return context.settings or resolve(context.overrides).settings


def _is_available() -> bool:
    """True if a session is open or could begin; logs why not. A positive reply is cached until `configure`."""
    if context.answered or is_initialized() or not _named_servers():
        return True
    from djinn_client.runtime.connecting.status import why_unavailable

    reason = why_unavailable(settings(), registry())
    if reason:
        log.warning("the remote device cannot be used", reason=reason)
    context.answered = not reason
    return not reason


def _prepare() -> None:
    """Begin the session with a server before the first op: if that fails, the op fails, and nothing was recorded in vain.

    An executor of this program's own begins to start; the program waits for it when something is sent.
    """
    port.prepare = _nothing
    if context.session is not None or port.forked:
        return
    if not _named_servers():
        start_early()
        return
    try:
        _session()
    except BaseException:
        port.prepare = _prepare
        raise


def _nothing() -> None:
    pass


def _described(index: int) -> tuple[str, DeviceInfo]:
    """The open session's name, and the device of an index; of all executors the first, with the memory of all."""
    assert context.opened
    infos = [one.attached.device for one in context.opened]
    if index:
        return session_name(), _opened_at(index).attached.device
    memory, free = sum(i.memory for i in infos), sum(i.memory_free or 0 for i in infos)
    return session_name(), msgspec.structs.replace(infos[0], memory=memory, memory_free=free)


def _opened_at(index: int) -> OpenSession:
    """The connection to the executor that an index of the device stands for, from 1."""
    session = context.session
    if session is None or session.membership is None:
        return context.opened[index - 1]
    return context.opened[session.membership.present.index(session.membership.number_at(index))]


def _residence(storage: int, index: int) -> str:
    """The executor that has a storage's memory, in words."""
    opened, session = context.opened, context.session
    if session is None or not opened:
        return "no session"
    pool = session.membership
    number = pool.number_at(index) if index and pool is not None else session.home(storage)
    if number is None:
        return "on no executor yet"
    one = _opened_at(number + 1)
    place = f"{one.attached.device.id} of {one.server}"
    return place if pool is None else f"executor {number} ({place})"


def after_fork() -> None:
    """Make the client of a forked child inert if `port.forked`. The child must not write to the parent's socket."""
    context.lock, context.loading = threading.RLock(), threading.RLock()  # a thread of the parent may have held them
    starting, context.starting = context.starting, ()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(starting))  # as below
    if port.forked:
        # Sockets and processes of the parent's: finalizing them here, at whatever moment the interpreter ends, would warn.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(context.opened))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(context.session))


def become_runtime() -> None:
    """Become the runtime of the device."""
    port.take(
        RuntimeFunctions(
            start=_runtime,
            is_available=_is_available,
            prepare=_prepare,
            device_count=_device_count,
            counts_when_open=lambda: not is_initialized() and _named_servers(),
            describe=_described,
            residence=_residence,
            is_open=is_initialized,
        )
    )
