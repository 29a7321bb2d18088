"""Client API of the process: the context with its settings and open session; clean-up at exit and after a fork."""

from __future__ import annotations

import copy
import ctypes
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from djinn_client.hookspecs.routers import Router
from djinn_client.interception import interpreter_shutdown
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.device.numeric_settings import require_exact
from djinn_client.interception.recording.recorder import recorders
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime import early_start
from djinn_client.runtime.connecting.open import OpenSession, open_connections, update_offered_operators
from djinn_client.runtime.context import InitHook, context
from djinn_client.runtime.executor_client import ExecutorClient
from djinn_client.runtime.planning import session_planner
from djinn_client.runtime.plugins import integrate_registered, open_plugins
from djinn_client.runtime.receiving.failures import Failures
from djinn_client.runtime.reconfiguring import (
    PLANNING,
    PLUGINS,
    changed,
    executor_plugins_differ,
    needing_new_session,
)
from djinn_client.runtime.session import Session
from djinn_client.runtime.sink import ClientSink
from djinn_client.sink import OpHandler
from djinn_client.tracebacks import for_users
from djinn_core.errors import ConfigurationError, DjinnError, ForkedProcess, SessionLost, install_hint
from djinn_core.hookspecs.observers import Observer
from djinn_core.ir.handles import new_storage
from djinn_core.ir.short_repr import ShortRepr
from djinn_core.logs import get_logger, set_debug_level
from djinn_core.observing import EventFeed
from djinn_core.registry.embedded_executors import LOCAL
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings, resolve
from djinn_core.system.gc_pause import collect_later
from djinn_core.wire.messages import DeviceInfo, StatsReply, StatsRequest, TemplateDecision

# Modules for own executors, pools and plans are imported by the sessions that need them.
if TYPE_CHECKING:
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
    "record_plans",
    "register_init_hook",
    "registry",
    "reset_stats",
    "session_name",
    "settings",
    "shut_down",
    "stats",
    "synchronize",
]

FINISH_SECONDS: Final = 60.0  # seconds that a program waits at exit for its own executors to write files
log = get_logger("djinn.client")


@for_users
def configure(
    plugins: Any = None,
    servers: Any = None,
    token: str | None = None,
    connection_file: Any = None,
    **settings: Any,
) -> None:
    """Override the environment and the configuration file.

    Args:
        plugins: the plugins to use in addition to the built-in plugins, as names, modules or objects.
        servers: URLs of servers, such as `["tcp://gpu-box:5556"]`.
        token: the token of the servers.
        connection_file: a file that `djinn serve` wrote, in place of `servers` and `token`.
        **settings: any other field of `Settings`. `plugin_settings` is a dict by plugin, such as `{"my_plugin":
            {"its_setting": 32}}`.

    An argument that is None changes nothing. Earlier overrides stay. A call without arguments removes all overrides. An open session applies the settings that it
    can change. Other settings need a new session. If the open session holds no tensors, it ends with a warning, and the
    next use begins a new session. If it holds tensors, nothing changes, and `ConfigurationError` is raised.

    Raises:
        ConfigurationError: a setting is unknown or malformed, or needs a new session while this session holds
            tensors.
        PluginError: a named plugin cannot be used.
    """
    parameters = {"plugins": plugins, "servers": servers, "token": token, "connection_file": connection_file}
    new_overrides = {**{k: v for k, v in parameters.items() if v is not None}, **settings}
    with context.lock:
        overrides = _merge(context.overrides, new_overrides) if new_overrides else {}
        new_settings = resolve(overrides).settings
        registry = open_plugins(new_settings)
        if is_initialized():
            _reconfigure(new_settings, registry)
        else:
            shut_down()  # a lost session
            _apply(new_settings, registry)
        context.overrides = overrides


def _merge(overrides: Mapping[str, Any], new_overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return earlier overrides with new overrides merged in. Tables of plugin settings are merged as well."""
    old, new = overrides.get("plugin_settings"), new_overrides.get("plugin_settings")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return {**overrides, **new_overrides}
    plugin_settings = {name: {**old.get(name, {}), **new.get(name, {})} for name in {**old, **new}}
    return {**overrides, **new_overrides, "plugin_settings": plugin_settings}


def _reconfigure(settings: Settings, registry: Registry) -> None:
    """Change the open session's settings. If it cannot apply some of them and holds no tensors, end it."""
    old_registry, old_settings = context.configured()
    names = changed(old_settings, settings)
    unchangeable = needing_new_session(
        names, old_settings, executor_plugins_differ(old_registry, registry, old_settings)
    )
    if unchangeable:
        _end_without_tensors(", ".join(sorted(unchangeable)))
    elif not names & PLUGINS:
        registry = old_registry  # the observers of the session may have state
    _apply(settings, registry)
    if not unchangeable and names & (PLANNING | PLUGINS):
        session_planner.drop_plans(context)
    if names and not unchangeable:
        log.info("the settings of the open session have changed", settings=sorted(names))


def _end_without_tensors(names: str) -> None:
    """End the session because of the settings `names`.

    Raises:
        ConfigurationError: the session holds tensors, which would be lost.
    """
    tensor_count = port.interception.live(context.first_storage)
    if tensor_count:
        raise ConfigurationError(
            f"djinn.configure() has changed nothing: {names} cannot change in an open session, and this session holds "
            f"{tensor_count} tensor{'s' if tensor_count > 1 else ''}, which would be lost. Call djinn.configure() before the "
            "first use of the device, or end the session with djinn.shut_down() first"
        )
    shut_down()
    log.warning(
        "djinn.configure() has ended the session, which held no tensors: the next use of the device begins a new "
        "session with a new random state",
        changed=names,
    )


def _apply(settings: Settings, registry: Registry) -> None:
    fallback = _handler_in(registry, "fallback") if settings.client_fallback else None
    if settings.client_fallback and fallback is None:
        raise ConfigurationError(
            "the setting client_fallback needs a plugin with the op handler 'fallback', but no plugin offers it: run "
            + install_hint("plugins/integrations")
        )
    if context.settings is not None and settings != context.settings:
        _stop_early()
    _intercept(settings.interception, registry)
    context.settings, context.registry = settings, registry
    integrate_registered(context, registry)
    context.observers.replace_feeds([EventFeed(o, registry.owner("observers", o.name)) for o in registry.observers])
    port.checkpoint_instructions = settings.checkpoint_instructions
    recorders.limit_programs()
    device_state.wait_timeout = settings.wait_timeout
    require_exact(settings.exact)
    port.fallback = fallback
    if settings.client_fallback or context.session is None:
        port.interception.reconsider()
    if settings.debug:
        set_debug_level(settings.debug)
    context.was_available, port.prepare = False, _prepare


def _intercept(name: str, registry: Registry) -> None:
    """Begin the interception with this name, unless it has begun.

    Raises:
        ConfigurationError: no plugin offers the interception.
    """
    if port.interception.name == name:
        return
    interceptions = {interception.name: interception for interception in registry.interception}
    if name not in interceptions:
        raise ConfigurationError(
            f"no plugin offers the interception {name!r}. Set `interception` to one of {', '.join(sorted(interceptions))}"
        )
    interceptions[name].begin(port.sink)
    port.interception = interceptions[name]


def settings() -> Settings:
    """Return the settings in force."""
    _load()
    assert context.settings is not None
    return context.settings


def registry() -> Registry:
    """Return the plugins in use."""
    _load()
    return context.configured()[0]


def _handler_in(registry: Registry, name: str) -> OpHandler | None:
    return next((handler for handler in registry.op_handlers if handler.name == name), None)


def _load() -> None:
    if context.settings is not None and context.registry is not None:
        return
    with collect_later, context.lock:
        if context.settings is None:
            new_settings = resolve(context.overrides).settings
            _apply(new_settings, open_plugins(new_settings))


@for_users
def init() -> None:
    """Connect now instead of at the first use of the device. Threads that call this at the same time share one session.

    A new session replaces a lost session.

    Raises:
        StartupError: the embedded executor does not start.
        TransportError: no server can be reached.
        AccessRefused: the server does not accept the token.
    """
    _session()


def _session() -> Session:
    if port.forked:
        raise ForkedProcess
    if interpreter_shutdown.has_begun():
        raise SessionLost(
            "the session has ended, because the program is ending: use remote tensors earlier, or in a function that you "
            "register with atexit"
        )
    session = context.session
    if session is not None and not session.lost:
        return session
    # Finalizers that use the device must not begin a second session during this call.
    with collect_later, context.lock:
        session = context.session
        if session is not None and not session.lost:
            return session
        session = _open()
        hooks = list(context.hooks)
    # Without the lock, because hooks may use the device, also on threads that they start.
    if _resolve_settings().engine != LOCAL and any(session.executor is not None for session in context.opened):
        router = _find_router()  # a single executor needs no router
        if router is not None:
            router.watch()
    for hook in hooks:
        hook()
    return session


def _open() -> Session:
    if context.session is not None:
        _end_session()
    began = time.perf_counter()
    members = _connect()
    try:
        session = _new_session(members)
    except BaseException:
        for member in members:
            member.close()
        raise
    context.session = session
    if update_offered_operators(members):
        port.interception.reconsider()  # ops recorded before there was a server were assumed to be supported
    if port.missing:
        _warn_of_missing(port.missing)
    log.info("connected", server=session.server, session=session_name())
    kinds = tuple(member.attached.device.kind for member in members)
    facts = {"server": session.server, "fallbacks": members[0].fallbacks, "kinds": kinds}
    context.observers.emit("connected", **facts, seconds=time.perf_counter() - began)
    return session


def _new_session(opened: tuple[OpenSession, ...]) -> Session:
    """Return a session over open connections. It raises the errors of `Session.join`."""
    session_planner.new_planner(context, len(opened))
    session = Session(_executor_client, _chosen_router, port.interception.values)
    session.join(opened)
    return session


def _find_router() -> Router | None:
    """Return the router that the settings name, or else the router with the greatest preference.

    Return None if no plugin offers such a router.
    """
    registry, settings = context.configured()
    routers = {router.name: router for router in registry.routers}
    ranking = sorted((-router.preference, name) for name, router in routers.items() if router.preference is not None)
    return routers.get(settings.router or (ranking[0][1] if ranking else ""))


def _chosen_router() -> Router:
    """Return a copy of the router for one session. Late replies of an ended session do not reach the copy.

    Raises:
        ConfigurationError: no plugin offers the router.
    """
    if (router := _find_router()) is not None:
        return copy.copy(router)
    registry, settings = context.configured()
    missing = f"no plugin offers {settings.router!r}" if settings.router else "no plugin offers a default router"
    names = [router.name for router in registry.routers]
    raise ConfigurationError(
        f"several executors need a router, but {missing}. Available routers: {', '.join(sorted(names)) or 'none'}. Install the "
        f"router `pool`: run {install_hint('plugins/pool')}. If the setting `plugins` is set, add `pool` to it"
    )


def _executor_client(session: OpenSession, failures: Failures, number: int) -> ExecutorClient:
    assert context.planner is not None
    return ExecutorClient(session, context.planner, context.stats, context.observers, failures, number)


def _warn_of_missing(missing: Mapping[str, str]) -> None:
    """Warn of recorded ops that the new server lacks. Later calls of such ops raise when they are recorded.

    `missing`: as `Facts.missing`.
    """
    latest = context.captures.latest
    names = {entry.call.op for recorder in recorders.all() for entry in recorder.entries}
    names.update(call.op for call in (latest.program.calls if latest is not None else ()))
    for name in sorted(names & missing.keys()):
        log.warning("a recorded program needs an op that a server lacks", op=name, server=missing[name])


def start_early() -> None:
    """Start this program's own executors in the background, if a session would use them.

    If an executor does not start, the first wait for it raises the error.
    """
    with context.lock:
        if context.started_executors or context.session is not None or port.forked:
            return
        try:
            context.started_executors = _own_executors()
        except DjinnError as error:
            log.debug("no executor was started early", reason=str(error))


def _own_executors() -> tuple[EmbeddedExecutor, ...]:
    """Return this program's own executors, started now or by `import djinn`.

    Return an empty tuple if a server or engine provides the executors.
    """
    settings = _resolve_settings()
    early = early_start.process_start
    executors: tuple[EmbeddedExecutor, ...] = early.take(settings) if early is not None else ()
    if executors:
        return executors
    if _has_servers():
        return ()
    from djinn_client.runtime.connecting.own_executor import start_executors

    return start_executors(settings) if settings.engine == LOCAL else ()


def _stop_early() -> None:
    """End started executors that no session uses."""
    executors, context.started_executors = context.started_executors, ()
    for executor in executors:
        executor.close(0.0)


def _connect() -> tuple[OpenSession, ...]:
    # The executors start while plugins are loaded, unless they have started already or a plugin starts them.
    executors, context.started_executors = context.started_executors, ()
    executors = executors or _own_executors()
    try:
        members = open_connections(settings(), registry(), executors)
    except BaseException:
        for executor in executors:
            executor.close(0.0)
        raise
    if executors and early_start.process_start is not None:
        early_start.process_start.note(settings())
    return members


async def init_async() -> None:
    """Run `init()` without blocking the event loop."""
    import asyncio

    await asyncio.to_thread(init)


@for_users
def register_init_hook(hook: InitHook) -> None:
    """Call `hook` when a session begins. If a session is open, also call it now."""
    with context.lock:
        context.hooks.append(hook)
        is_open = is_initialized()
    if is_open:
        hook()


def is_initialized() -> bool:
    """True while a session is open."""
    return context.is_open


@attrs.frozen(repr=False)
class RuntimeState(ShortRepr):
    """Current state of the client, in a form for people.

    Attributes:
        initialized: True if a session is open.
        servers: the names of the session's servers in messages, in device order.
        devices: their physical devices.
        plugins: names of the plugins in use.
        stats: counters, as in `djinn.stats()`.
    """

    initialized: bool
    servers: tuple[str, ...]
    devices: tuple[DeviceInfo, ...]
    plugins: tuple[str, ...]
    stats: Mapping[str, int]


@for_users
def get_runtime_state() -> RuntimeState:
    """Return the state of the client. This does not connect."""
    members = context.opened if is_initialized() else ()
    return RuntimeState(
        initialized=is_initialized(),
        servers=tuple([member.server for member in members]),
        devices=tuple([member.now.device for member in members]),
        plugins=tuple([row.name for row in registry().rows if row.status == "active"]),
        stats=stats(),
    )


@for_users
def shut_down() -> None:
    """End the session, and its embedded executor if it has one. Its tensors are lost."""
    with collect_later, context.lock:
        if context.session is not None and not port.forked:
            _end_session()
        _stop_early()


def _end_session() -> None:
    """End the session, lost or not. Drop its recorded ops."""
    members, session = context.opened, context.session
    context.session = None
    assert session is not None
    # another thread, or a call that Ctrl-C interrupted, has ended it
    finish = not session.lost and session.changes_files
    session.close(finish=finish)
    with port.lock:
        port.interception.forget()
        port.sessions_ended += 1
    port.missing, port.offered = {}, {}
    context.first_storage = new_storage()
    context.observers.emit("disconnected", server=session.server)
    context.ended_bytes = (
        context.ended_bytes[0] + sum(member.connection.bytes_sent for member in members),
        context.ended_bytes[1] + sum(member.connection.bytes_received for member in members),
    )
    for member in members:
        if member.executor is not None:
            member.executor.close(FINISH_SECONDS if finish else 0.0)  # no thread waits for its remaining work


@for_users
def synchronize() -> None:
    """Send the recorded ops and wait until the devices have finished them.

    Raises:
        RemoteError: an op failed since the last sync point.
    """
    _load()
    port.interception.synchronize()


def cancel(thread: threading.Thread | None = None) -> None:
    """Cancel this program's unanswered submissions, from any thread.

    If `thread` is not None, cancel only the submissions of that thread.

    Waits for cancelled submissions raise `ProgramStopped` within a tenth of a second. Executors stop between two ops,
    within half a second. Using a value that the stopped work should have computed or written raises `ProgramStopped`. All other
    values, the session and later ops work as usual.
    """
    session = context.session
    if session is not None and not session.lost and not port.forked:
        session.cancel(None if thread is None else thread.ident or 0)


def device() -> DeviceInfo | None:
    """Return the physical device of the open session's first executor, or None if no session is open."""
    return context.opened[0].attached.device if context.opened else None


def session_name() -> str:
    """Return the name of the open session, or an empty text if no session is open."""
    return context.opened[0].now.session if context.opened else ""


def last_profile() -> WorkloadProfile | None:
    """Return the workload profile of the last sent program, or None if this session has sent no program.

    A program that ran without a plan is analysed by this call. Value ids and counts, such as the number of attention
    keys, are those of the program's first run.
    """
    return context.session.router.last_profile() if context.session is not None else None


@contextmanager
def record_plans() -> Iterator[list[PipelineResult]]:
    """Collect every plan that is created inside the block. Measured times are added when the block ends."""
    recording: list[PipelineResult] = []
    if context.registry is not None:
        context.registry.load(*session_planner.PLANNING)
    context.recordings.append(recording)
    try:
        yield recording
    finally:
        context.recordings.remove(recording)
        recording[:] = [session_planner.with_measured(context, result) for result in recording]


def template_decisions() -> Sequence[TemplateDecision]:
    """Return, for each template on each executor of the open session, the run strategy that the executor chose, and why."""
    session, decisions = context.session, list[TemplateDecision]()
    if session is not None and not session.lost:
        for device in range(len(context.opened)):
            decisions += session.router.ask(StatsRequest(decisions=True), StatsReply, device).decisions
    return decisions


def stats() -> Mapping[str, int]:
    """Return counters since the start or the last reset. Sizes are in bytes.

    A counter `plans_for_sizes, PLUGIN` means that PLUGIN restricts plans to fewer sizes. A counter `sessions, SCHEME`
    is the number of executors that are connected by the transport with this URL scheme.
    """
    return context.counters()


def reset_stats() -> None:
    """Reset all counters to zero."""
    context.reset_counters()


def executor_process() -> int:
    """Return the process id of the open session's first executor, on its machine, or 0 if no session is open."""
    return context.opened[0].process if context.opened else 0


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Context manager in which `observer` receives events, as the observers of plugins do."""
    with context.observers.joined_by(observer):
        yield


def _device_count() -> int:
    """Return the number of logical devices: index 0 for all executors and, if there are several, one index for each."""
    if (session := context.session) is None:
        count = 1 if _has_servers() else _resolve_settings().executors
    else:  # executors that have left count, because their indexes refer to their heirs
        count = len(session.executors.members)
    return 1 + count if count > 1 else 1


def _has_servers() -> bool:
    settings = _resolve_settings()
    return bool(settings.servers or settings.connection_file)


def _resolve_settings() -> Settings:
    """Return the settings. Load no plugins, because even `torch.manual_seed` asks for the number of devices."""
    return context.settings or resolve(context.overrides).settings


def _is_available() -> bool:
    """Return True if a session is open or could begin.

    Otherwise log the reason. A positive answer is cached until `configure`.
    """
    if context.was_available or is_initialized() or not _has_servers():
        return True
    from djinn_client.runtime.connecting.servers import why_unavailable

    reason = why_unavailable(settings(), registry())
    if reason:
        log.warning("the remote device cannot be used", reason=reason)
    context.was_available = not reason
    return not reason


def _prepare() -> None:
    """Begin the session with a server before the first op. If that fails, the op fails, and nothing is recorded.

    A program's own executor starts in the background, and the program waits for it at the first send. If the setting
    `operators` allows custom ops, the program waits now, because their recording depends on the executor.
    """
    port.prepare = _nothing
    if context.session is not None or port.forked:
        return
    if not _has_servers() and not settings().operators:
        start_early()
        return
    try:
        _session()
    except BaseException:
        port.prepare = _prepare
        raise


def _nothing() -> None:
    pass


def _device_info(index: int) -> tuple[str, DeviceInfo]:
    """Return the open session's name, and the device of an index.

    For index 0 (all executors), return the first executor's device, but with the sum of the memory of all devices.
    """
    assert context.opened
    infos = [member.attached.device for member in context.opened]
    if index:
        assert context.session is not None
        return session_name(), context.session.executors.for_index(index)[0].device
    memory, free = sum(i.memory for i in infos), sum(i.memory_free or 0 for i in infos)
    return session_name(), msgspec.structs.replace(infos[0], memory=memory, memory_free=free)


def _residence(storage: int, index: int) -> str:
    """Return a text that names the executor with the memory of `storage`. `index`: the storage's logical device."""
    session = context.session
    if session is None:
        return "no session"
    executors = session.executors
    number = executors.number_at(index) if index else session.router.home(storage)
    if number is None:
        return "on no executor yet"
    member = executors.members[number].opened
    device_name = f"{member.attached.device.id} of {member.server}"
    return device_name if len(executors.members) == 1 else f"executor {number} ({device_name})"


def after_fork() -> None:
    """Reset the lock in a forked child. Never finalize the executors and the session, which belong to the parent."""
    # a thread of the parent may have held the lock
    context.lock = threading.RLock()
    executors, context.started_executors = context.started_executors, ()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(executors))  # as for the session below
    if port.forked:
        # Sockets and processes belong to the parent: finalizing them here, at an arbitrary moment, would warn.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(context.session))


def become_runtime() -> None:
    """Install the client as the runtime of the device."""
    port.sink = ClientSink(context, _session)
    port.is_available, port.prepare, port.device_count = _is_available, _prepare, _device_count
    port.counts_when_open = lambda: not is_initialized() and _has_servers()
    port.describe, port.residence = _device_info, _residence
    port.round_trip_seconds = lambda: context.session.round_trip_seconds if context.session is not None else None
    port.op_handler, port.operators = lambda name: _handler_in(registry(), name), lambda: registry().operators
    port.is_open = is_initialized  # set last: code that sees the client's sink may rely on all other functions
