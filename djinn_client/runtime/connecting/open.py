"""Opening connections from settings: to a server's gateway and then its executor, or to an embedded executor."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import attrs
import msgspec
import torch

from djinn_client.hookspecs.channels import ChannelContext, StandbyServer
from djinn_client.hookspecs.client_channel import ClientChannel, PlainClientChannel
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime.connecting.handshake import (
    Server,
    attach,
    client_name,
    failure_text,
    reach_executor,
    slowness,
    unreachable,
)
from djinn_client.runtime.connecting.own_executor import check_for_servers, start_executors
from djinn_client.runtime.connecting.reconnect import (
    EmbeddedReconnection,
    ResumingConnection,
    ServerReconnection,
    connect_executor,
)
from djinn_client.runtime.connecting.servers import (
    ENGINE,
    Servers,
    ask_loads,
    find_servers,
    server_tls,
    standby_servers,
)
from djinn_core.errors import AccessRefused, DjinnError, PluginError, ServerBusy, TransportError, install_hint
from djinn_core.ir.operators import allowed_operators
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import has_transport, server_name
from djinn_core.protocol.backoff import Backoff
from djinn_core.protocol.delivery.reconnect_limit import STARTING_SECONDS
from djinn_core.protocol.tls_transports import is_unprotected
from djinn_core.registry.embedded_executors import EmbeddedExecutor, find_starter
from djinn_core.registry.loading import shown
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings, bytes_of, unknown_variables
from djinn_core.wire.messages import Attached, Welcome

LOAD_SECONDS: Final = 3.0  # seconds for the load query; a server that takes longer counts as busiest
FIRST_PAUSE_SECONDS: Final = 0.1  # pause in seconds between attempts at a full server
MAX_PAUSE_SECONDS: Final = 3.0
_log = get_logger("djinn.runtime")
T = TypeVar("T")


class OpenSession(msgspec.Struct, frozen=True):
    """A session with an executor that has begun.

    Attributes:
        connection: the channel for its frames.
        attached: the executor's reply.
        url: the address in use; `inline` if the executor is a thread of this process.
        fallbacks: addresses that failed before, each with the reason.
        executor: the executor that this program started for the session, and that ends with it. None: a server runs it.
        addresses: known addresses of the server's gateway.
        server: name of the server in messages: the configured address.
    """

    connection: ClientChannel
    attached: Attached
    url: str
    fallbacks: tuple[str, ...] = ()
    executor: EmbeddedExecutor | None = None
    addresses: tuple[str, ...] = ()
    server: str = "this program's own executor"

    @property
    def now(self) -> Attached:
        """Return the `Attached` reply of the current executor. After a failover, another server sent it."""
        return self.connection.successor or self.attached

    @property
    def compressions(self) -> tuple[str, ...]:
        """Return the compressions for uploads.

        A Unix socket or a thread of this process gets none, because decompression is slower than a copy.
        """
        return () if self.url.startswith(("unix:", "inline")) else self.attached.compressions

    @property
    def process(self) -> int:
        """Process id of the executor, on its machine."""
        return self.executor.process_id if self.executor is not None else self.now.process

    def close(self) -> None:
        """Close the connection. End the executor if this program started it."""
        self.connection.close()
        if self.executor is not None:
            self.executor.close(0.0)


def open_connections(
    settings: Settings, registry: Registry, executors: Sequence[EmbeddedExecutor] = ()
) -> tuple[OpenSession, ...]:
    """Begin a session with each device of each configured server. Without a server, use embedded executors.

    Servers that cannot be reached are skipped with a warning. If none can be reached, this raises an error.

    Args:
        settings: the settings in force.
        registry: plugins with the transports.
        executors: result of `start_executors` for these settings, closed if this raises.

    Raises:
        ConfigurationError: an address or the connection file is malformed, or there is no token.
        PluginError: no transport serves the address, no plugin implements the setting `standby`, or a plugin is for
            executors only and no executor can import it. The message says what to install or change.
        TransportError: no server can be reached.
        AccessRefused: the server refuses this client.
        StartupError: this program's own executor does not start.
    """
    _warn_of_misspelt(os.environ)
    _check_standby(settings, registry)
    servers = find_servers(settings, registry.transports)
    if servers is not None:
        check_for_servers(settings.plugins)
        sessions = _open_first(settings, registry, servers)
    elif settings.executor == "inline":
        sessions = _wrap_channels(
            settings,
            registry,
            (open_inline(settings),),
            lambda session: ChannelContext(session.server, session.attached),
        )
    else:
        own = open_embedded(settings, registry, executors or start_executors(settings, registry))
        sessions = _wrap_channels(settings, registry, own, partial(_context_of_own, settings, registry))
    _log_sessions(sessions, registry)
    return sessions


def open_more(
    settings: Settings,
    registry: Registry,
    joining: Sequence[EmbeddedExecutor] | Servers,
    current: Sequence[OpenSession],
) -> tuple[OpenSession, ...]:
    """Begin sessions with started executors, or with the devices of further servers, in addition to `current`.

    An executor of `current` under another address is skipped. This raises the errors of `open_connections`.
    """
    if isinstance(joining, Servers):
        sessions = _open_servers(settings, joining.each(registry.transports, settings.connect_timeout))
        instances = {session.attached.instance for session in current}
        new = tuple([session for session in sessions if session.attached.instance not in instances])
        for session in sessions:
            if session not in new:
                session.close()
        standbys = standby_servers(settings, joining.tls)
        wrapped = _wrap_channels(settings, registry, new, partial(_context_of, settings, registry, joining, standbys))
    else:
        own = open_embedded(settings, registry, joining)
        wrapped = _wrap_channels(settings, registry, own, partial(_context_of_own, settings, registry))
    _log_sessions(wrapped, registry)
    return wrapped


def _log_sessions(sessions: Sequence[OpenSession], registry: Registry) -> None:
    """Log warnings about the new sessions for the user."""
    for member in sessions:
        for fallback in member.fallbacks:
            _log.warning(f"fell back from {fallback}", to=member.url)
        _compare_torch(member)
        if is_unprotected(member.url, registry.transports):
            _log.warning("the connection is unencrypted, including the token", server=member.url)


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Warn of environment variables whose names are almost settings, because a misspelt setting has no effect."""
    for variable, suggestion in unknown_variables(environ).items():
        if suggestion:
            _log.warning(
                f"the environment sets {variable}, which is not a setting of Djinn: did you mean {suggestion}?"
            )


def _open_first(settings: Settings, registry: Registry, servers: Servers) -> tuple[OpenSession, ...]:
    """Begin sessions with the configured servers. If none can be reached, use a standby server."""
    candidates = [servers, *standby_servers(settings, servers.tls)]
    failures: list[tuple[str, DjinnError]] = []
    for position, candidate in enumerate(candidates):
        try:
            sessions = _open_servers(settings, candidate.each(registry.transports, settings.connect_timeout))
        except TransportError as error:
            if len(candidates) == 1:
                raise
            failures.append((", ".join(candidate.urls), error))
            continue
        standbys = [*candidates[position + 1 :], *candidates[:position]]
        sessions = _with_fallbacks(failures, sessions)
        context_of = partial(_context_of, settings, registry, candidate, standbys)
        return _wrap_channels(settings, registry, sessions, context_of)
    raise unreachable([error for _, error in failures])


def _context_of(
    settings: Settings, registry: Registry, servers: Servers, standbys: Sequence[Servers], session: OpenSession
) -> ChannelContext:
    """Return the context of a session with one of `servers`.

    If `standbys` is not empty, one of them or another executor of the session's own server may take the session over.
    """
    addresses = {session.url, *session.addresses}
    own_server = attrs.evolve(
        servers, members=tuple(urls for urls in servers.members if addresses & {*urls}) or servers.members
    )
    candidates = (*standbys, own_server) if standbys else ()
    return ChannelContext(
        own_server.urls[0], session.attached, tuple([_candidate(settings, registry, c) for c in candidates])
    )


def _context_of_own(settings: Settings, registry: Registry, session: OpenSession) -> ChannelContext:
    """Return the context of a session with this program's own executor.

    The setting `standby` names who may take the session over: another executor of the same engine, or servers.
    """
    servers = {standby.urls: standby for standby in standby_servers(settings, server_tls(settings))}
    candidates = [_candidate(settings, registry, standby) for standby in servers.values()]
    if ENGINE in settings.standby and session.executor is not None:
        start = partial(reopen_own, settings, registry, session.executor)
        candidates.insert(settings.standby.index(ENGINE), StandbyServer("its engine", start))
    return ChannelContext(session.server, session.attached, tuple(candidates))


def _candidate(settings: Settings, registry: Registry, servers: Servers) -> StandbyServer:
    server = Server(servers.urls, servers.token, servers.transports(registry.transports), settings.connect_timeout)

    def begin() -> tuple[ClientChannel, Attached]:
        device = (settings.server_devices or (settings.device,))[0]
        session, _ = _begin(settings, server, device)
        session.connection.limit_reconnect_seconds(settings.standby_seconds)
        return session.connection, session.attached

    return StandbyServer(servers.urls[0], begin)


def _check_standby(settings: Settings, registry: Registry) -> None:
    """Raise `PluginError` if the settings name standby servers, and no plugin continues sessions on them."""
    if settings.standby and not any(wrapper.takes_over for wrapper in registry.channels):
        raise PluginError(
            "the setting `standby` needs a plugin that continues a lost session on another server, but no such plugin is in "
            f"use: run {install_hint('plugins/standby')}. If the setting `plugins` is set, add `standby` to it"
        )


def _wrap_channels(
    settings: Settings,
    registry: Registry,
    sessions: tuple[OpenSession, ...],
    context_of: Callable[[OpenSession], ChannelContext],
) -> tuple[OpenSession, ...]:
    """Return the sessions with channels that plugins have wrapped. Close the sessions if this raises."""
    log_bytes = bytes_of(settings.standby_gib) // max(1, len(sessions))
    wrapped_sessions = list(sessions)
    try:
        for position, session in enumerate(sessions):
            context = attrs.evolve(context_of(session), log_bytes=log_bytes)
            for wrapped_sessions[position] in _wrap_stepwise(settings, registry, session, context):
                pass
    except BaseException:
        for session in wrapped_sessions:
            session.close()
        raise
    return tuple(wrapped_sessions)


def _wrap_stepwise(
    settings: Settings, registry: Registry, session: OpenSession, context: ChannelContext
) -> Iterator[OpenSession]:
    """Wrap the channel of `session` with each plugin's wrapper. Yield the session after each wrapper."""
    if context.standby and ENGINE not in settings.standby:  # a wrapper may take any time
        session.connection.limit_reconnect_seconds(settings.standby_seconds)
    for wrapper in sorted(registry.channels, key=lambda wrapper: not wrapper.takes_over):
        try:
            channel: object = wrapper.wrap(
                session.connection, context if wrapper.takes_over else attrs.evolve(context, standby=())
            )
        except DjinnError:
            raise
        except Exception as error:
            plugin = registry.owner("channels", wrapper.name)
            raise PluginError(f"{plugin}: wrapping the channel to {context.server} raised {shown(error)}") from error
        if not isinstance(channel, ClientChannel):
            plugin, kind = registry.owner("channels", wrapper.name), type(channel).__name__
            raise PluginError(f"{plugin}: `wrap` returned a {kind}, not a channel, for {context.server}")
        attached = session.attached
        if channel.logged:  # another server lacks this server's cache, so everything is sent, and logged
            attached = msgspec.structs.replace(attached, caches_weights=False)
        session = msgspec.structs.replace(session, connection=channel, attached=attached)
        yield session
        if wrapper.takes_over:
            context = attrs.evolve(context, standby=())


def _open_servers(settings: Settings, servers: Sequence[Server]) -> tuple[OpenSession, ...]:
    """Begin a session with each server. If several addresses lead to the same server, begin a single session."""
    sessions: list[OpenSession] = []
    failures: list[tuple[str, DjinnError]] = []
    try:
        for server in _in_order(settings, servers):
            if any(
                url in session.addresses and has_transport(url, server.transports)
                for session in sessions
                for url in server.urls
            ):
                continue  # another address of the same server
            try:
                members, device_failures = _open_devices(settings, server, secondary=bool(sessions))
            except (TransportError, PluginError) as error:
                reason = error.__cause__
                failures.append((", ".join(server.urls), reason if isinstance(reason, DjinnError) else error))
                continue
            failures += device_failures
            instances = {session.attached.instance for session in sessions}
            for member in members:
                if member.attached.instance in instances:
                    member.close()
                else:
                    sessions.append(member)
        if not sessions:
            raise unreachable([error for _, error in failures])
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return _with_fallbacks(failures, sessions)


def _with_fallbacks(
    failures: Iterable[tuple[str, DjinnError]], sessions: Sequence[OpenSession]
) -> tuple[OpenSession, ...]:
    """Return the sessions, with `failures` (address and error) in the fallbacks of the first session."""
    first = sessions[0]
    fallbacks = (*[failure_text(*pair) for pair in failures], *first.fallbacks)
    return (msgspec.structs.replace(first, fallbacks=fallbacks), *sessions[1:])


def _in_order(settings: Settings, servers: Sequence[Server]) -> list[Server]:
    """Return the servers sorted by the speed of their transports, then by load, then at random.

    Device numbers follow this order. If `spread` is off, or settings name devices, loads and chance have no influence.
    """

    def slow(server: Server) -> float:
        return slowness(server.urls[0], server.transports)

    if len(servers) < 2 or not settings.spread or settings.pins or settings.memory_limits:
        return sorted(servers, key=slow)
    timeout = min(settings.connect_timeout, LOAD_SECONDS)
    loads = ask_loads([attrs.evolve(server, timeout=timeout) for server in servers])
    keys = [(slow(server), load, random.random()) for server, load in zip(servers, loads, strict=True)]  # noqa: S311 - no secret
    return [servers[n] for n in sorted(range(len(servers)), key=keys.__getitem__)]


def _open_devices(
    settings: Settings, server: Server, secondary: bool
) -> tuple[list[OpenSession], list[tuple[str, DjinnError]]]:
    """Begin a session with each requested device of one server. Also return the devices that failed, with reasons."""
    device_names = settings.server_devices or (settings.device,)
    first, welcome = _begin(settings, server, device_names[0], secondary)
    sessions, failures = [first], list[tuple[str, DjinnError]]()
    try:
        for number in _matching_devices(welcome, device_names):
            try:
                sessions.append(_begin(settings, server, str(number), secondary=True)[0])
            except (TransportError, AccessRefused) as error:
                failures.append((f"device {number} of {server.urls[0]}", error))
    except BaseException:
        for member in sessions:
            member.close()
        raise
    return sessions, failures


def _matching_devices(welcome: Welcome, names: Sequence[str]) -> list[int]:
    """Return the numbers of the devices, except the device in use, that match one of `names`, in the server's order."""

    def matches(number: int, device: str, name: str) -> bool:
        return not name or name in {str(number), device, device.partition(":")[0]}

    numbers = [n for n, device in enumerate(welcome.devices) if any(matches(n, device, name) for name in names)]
    return [number for number in numbers if number != welcome.number]


def _begin(settings: Settings, server: Server, device: str, secondary: bool = False) -> tuple[OpenSession, Welcome]:
    """Begin a session with an executor of `server`. Return the session and the gateway's reply.

    If the server is full, retry for `connect_timeout` seconds.
    """
    reach = partial(reach_executor, server, device, settings.assignment_hint, secondary)
    executor = retry_while_full(reach, settings.connect_timeout)
    attached, welcome, name = executor.attached, executor.welcome, server_name(server.urls)
    channel: ClientChannel = PlainClientChannel(executor.connection)
    if attached.lease:
        direct = "" if executor.relayed else executor.url
        target = (server, str(welcome.number), direct, welcome.fingerprint, attached.recoverable)
        redial = ServerReconnection(attached.session, attached.secret, attached.instance, *target)
        patience = attached.lease + (STARTING_SECONDS if attached.recoverable else 0.0)
        channel = ResumingConnection(executor.connection, redial, patience, name, settings.parallel_connections)
    session = OpenSession(channel, attached, executor.url, executor.fallbacks, addresses=welcome.gateway, server=name)
    return session, welcome


def _compare_torch(session: OpenSession) -> None:
    """Warn if client and executor run different versions of PyTorch."""
    ours, theirs = str(torch.__version__), session.attached.torch
    if ours.partition("+")[0] != theirs.partition("+")[0]:
        _log.warning(
            "client and executor run different versions of PyTorch: ops that the executor lacks are decomposed or raise an "
            "error, and results may differ in the last digits. Install the executor's version on this machine",
            client=ours,
            executor=theirs,
            url=session.url,
        )


def missing_operators(sessions: Sequence[OpenSession]) -> dict[str, str]:
    """Return the ops of this client that a server lacks, each with a text that names the server."""
    missing: dict[str, str] = {}
    for session in sessions:
        theirs = session.attached.operators
        if theirs is not None:
            names = allowed_operators().difference(theirs)
            missing |= dict.fromkeys(names, f"{session.server}, which runs PyTorch {session.attached.torch},")
    return missing


def update_offered_operators(sessions: Sequence[OpenSession]) -> bool:
    """Set `port.missing` and `port.offered`: the ops that a server lacks, and the custom ops that all executors run.

    Return True if calls that were recorded before may now be recorded in another way.
    """
    before = port.offered
    port.missing, port.offered = missing_operators(sessions), _offered_operators(sessions)
    return bool(port.missing) or port.offered != before


def _offered_operators(sessions: Sequence[OpenSession]) -> dict[str, str]:
    """Return the custom ops that every executor runs with the same schema, each with that schema."""
    first, *others = [{op.name: op.schema for op in session.attached.custom_operators} for session in sessions]
    return {name: schema for name, schema in first.items() if all(other.get(name) == schema for other in others)}


def retry_while_full(attempt: Callable[[], T], seconds: float) -> T:
    """Call `attempt` until it no longer raises `ServerBusy`, for at most `seconds`. Return its result.

    `attempt` must leave no connection open when it raises.

    Raises:
        ServerBusy: the server stayed full.
    """
    deadline, backoff = time.monotonic() + seconds, Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
    log = _log.warning  # the first time, then `debug`
    while True:
        try:
            return attempt()
        except ServerBusy as busy:
            pause = max(backoff.random_pause(), busy.after)
            if time.monotonic() + pause > deadline:
                raise
            log(f"the server is full: waiting up to {seconds:g} s (setting connect_timeout)", reason=str(busy))
            log = _log.debug
        time.sleep(pause)


def open_embedded(
    settings: Settings, registry: Registry, executors: Sequence[EmbeddedExecutor]
) -> tuple[OpenSession, ...]:
    """Begin a session with each started executor. Close the executors if this raises."""
    try:
        return tuple(_open_own(settings, registry, executor) for executor in executors)
    except BaseException:
        for executor in executors:
            executor.close(0.0)
        raise


def _open_own(settings: Settings, registry: Registry, executor: EmbeddedExecutor) -> OpenSession:
    timeout, start = settings.connect_timeout, settings.start_timeout
    url, connection = connect_executor(executor, registry.transports, start, timeout)
    attached = attach(connection, executor.issue_ticket(client_name()), timeout)
    channel: ClientChannel = PlainClientChannel(connection)
    if attached.recoverable:
        target = (executor, registry.transports, timeout, start)
        redial = EmbeddedReconnection(attached.session, attached.secret, attached.instance, *target)
        patience, name = executor.lease_seconds + start, "the executor of this program"
        channel = ResumingConnection(connection, redial, patience, name, settings.parallel_connections)
    return OpenSession(channel, attached, url, executor=executor)


def reopen_own(settings: Settings, registry: Registry, executor: EmbeddedExecutor) -> tuple[ClientChannel, Attached]:
    """Begin a session with this program's executor if its process still runs, or else with a replacement.

    Raises:
        DjinnError: no executor can be reached or started.
    """
    deadline, backoff = (
        time.monotonic() + settings.connect_timeout,
        Backoff(0.05, 1.0),
    )
    while True:
        executor.start_again()
        try:
            session = _open_own(settings, registry, executor)
        except TransportError:  # an executor that is exiting refuses connections, so retry
            if time.monotonic() > deadline:
                raise
            time.sleep(backoff.pause())
        else:
            return session.connection, session.attached


def open_inline(settings: Settings) -> OpenSession:
    """Begin a session with an executor that is a thread of this process."""
    connection, ticket = find_starter().begin_inline(settings, client_name())
    return OpenSession(PlainClientChannel(connection), attach(connection, ticket, settings.connect_timeout), "inline")
