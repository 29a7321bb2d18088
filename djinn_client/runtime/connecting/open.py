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
    given_up,
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
from djinn_core.protocol.tls_transports import travels_bare
from djinn_core.registry.embedded_executors import EmbeddedExecutor, find_starter
from djinn_core.registry.loading import shown
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings, bytes_of, unknown_variables
from djinn_core.wire.messages import Attached, Welcome

LOAD_SECONDS: Final = 3.0  # seconds for the load query; a server that takes longer counts as busiest
FIRST_PAUSE_SECONDS: Final = 0.1  # pause in seconds between attempts at a full server
LONGEST_PAUSE_SECONDS: Final = 3.0
_log = get_logger("djinn.runtime")
T = TypeVar("T")


class OpenSession(msgspec.Struct, frozen=True):
    """A session with an executor that has begun.

    Attributes:
        connection: the channel for its frames.
        attached: the executor's reply.
        url: the address in use; `inline` if the executor is a thread of this process.
        fallbacks: addresses that failed before, each with the reason.
        executor: the process that was started for this session, and ends with it. None: a server runs the executor.
        addresses: known addresses of its server.
        server: name of its server in messages, the configured address.
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

        On this machine there are none, because decompression is slower than a copy.
        """
        return () if self.url.startswith(("unix:", "inline")) else self.attached.compressions

    @property
    def process(self) -> int:
        """Process id of the executor, on its machine."""
        return self.executor.process_id if self.executor is not None else self.now.process

    def close(self) -> None:
        """Close the connection, and end the process that was started for it."""
        self.connection.close()
        if self.executor is not None:
            self.executor.close(0.0)


def open_connections(
    settings: Settings, registry: Registry, executors: Sequence[EmbeddedExecutor] = ()
) -> tuple[OpenSession, ...]:
    """Begin a session with each device of each configured server. Without a server, use embedded executors.

    A server that cannot be reached is skipped with a warning, unless it is the last server.

    Args:
        settings: the settings in force.
        registry: plugins with the transports.
        executors: result of `start_executors` for these settings, closed if this raises.

    Raises:
        ConfigurationError: an address or the connection file is malformed, or there is no token.
        PluginError: no transport serves the address, or no plugin implements the setting `standby`; the message names
            the folder of Djinn's package. Or a plugin is for executors only, and no executor can import it.
        TransportError: no server can be reached.
        AccessRefused: the server refuses this client.
        StartupError: this program's own executor does not start.
    """
    _warn_of_misspelt(os.environ)
    _check_standby(settings, registry)
    servers = find_servers(settings, registry.transports)
    if servers is not None:
        check_for_servers(settings.plugins)
        opened = _open_first(settings, registry, servers)
        _log_sessions(opened, registry)
        return opened
    if settings.executor == "inline":
        opened = _wrap_channels(
            settings, registry, (open_inline(settings),), lambda one: ChannelContext(one.server, one.attached)
        )
    else:
        own = open_embedded(settings, registry, executors or start_executors(settings, registry))
        opened = _wrap_channels(settings, registry, own, partial(_context_of_own, settings, registry))
    _log_sessions(opened, registry)
    return opened


def open_more(
    settings: Settings, registry: Registry, joining: Sequence[EmbeddedExecutor] | Servers, known: Sequence[OpenSession]
) -> tuple[OpenSession, ...]:
    """Begin sessions with started executors, or with the devices of further servers, in addition to `known`.

    A known server under another address is skipped. It raises the errors of `open_connections`.
    """
    if isinstance(joining, Servers):
        sessions = _open_servers(settings, joining.each(registry.transports, settings.connect_timeout))
        instances = {one.attached.instance for one in known}
        new = tuple([one for one in sessions if one.attached.instance not in instances])
        for one in sessions:
            if one not in new:
                one.close()
        others = standby_servers(settings, joining.tls)
        opened = _wrap_channels(settings, registry, new, partial(_context_of, settings, registry, joining, others))
    else:
        own = open_embedded(settings, registry, joining)
        opened = _wrap_channels(settings, registry, own, partial(_context_of_own, settings, registry))
    _log_sessions(opened, registry)
    return opened


def _log_sessions(opened: Sequence[OpenSession], registry: Registry) -> None:
    """Log warnings and facts about the new sessions for the user."""
    for member in opened:
        for fallback in member.fallbacks:
            _log.warning(f"fell back from {fallback}", to=member.url)
        _compare_torch(member)
        if travels_bare(member.url, registry.transports):
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
    every = [servers, *standby_servers(settings, servers.tls)]
    failed: list[tuple[str, DjinnError]] = []
    for position, one in enumerate(every):
        try:
            opened = _open_servers(settings, one.each(registry.transports, settings.connect_timeout))
        except TransportError as error:
            if len(every) == 1:
                raise
            failed.append((", ".join(one.urls), error))
            continue
        others = [*every[position + 1 :], *every[:position]]
        opened = _with_fallbacks(failed, opened)
        return _wrap_channels(settings, registry, opened, partial(_context_of, settings, registry, one, others))
    raise unreachable([error for _, error in failed])


def _context_of(
    settings: Settings, registry: Registry, servers: Servers, others: Sequence[Servers], one: OpenSession
) -> ChannelContext:
    """Return the context of a session with one of `servers`.

    The `others` may take the session over. Its own server may also take it over if the server has several executors.
    """
    addresses = {one.url, *one.addresses}
    mine = attrs.evolve(
        servers, members=tuple(urls for urls in servers.members if addresses & {*urls}) or servers.members
    )
    candidates = (*others, mine) if others else ()
    return ChannelContext(
        mine.urls[0], one.attached, tuple([_candidate(settings, registry, other) for other in candidates])
    )


def _context_of_own(settings: Settings, registry: Registry, one: OpenSession) -> ChannelContext:
    """Return the context of a session with this program's own executor.

    Another executor of its engine, or servers, may take the session over.
    """
    servers = {other.urls: other for other in standby_servers(settings, server_tls(settings))}
    candidates = [_candidate(settings, registry, other) for other in servers.values()]
    if ENGINE in settings.standby and one.executor is not None:
        start = partial(open_again, settings, registry, one.executor)
        candidates.insert(settings.standby.index(ENGINE), StandbyServer("its engine", start))
    return ChannelContext(one.server, one.attached, tuple(candidates))


def _candidate(settings: Settings, registry: Registry, servers: Servers) -> StandbyServer:
    whole = Server(servers.urls, servers.token, servers.transports(registry.transports), settings.connect_timeout)

    def begin() -> tuple[ClientChannel, Attached]:
        device = (settings.server_devices or (settings.device,))[0]
        opened, _ = _begin(settings, whole, device)
        opened.connection.limit_reconnect_seconds(settings.standby_seconds)
        return opened.connection, opened.attached

    return StandbyServer(servers.urls[0], begin)


def _check_standby(settings: Settings, registry: Registry) -> None:
    """Raise `PluginError` if the settings name standby servers, and no plugin continues sessions on them."""
    if settings.standby and not any(wrapper.takes_over for wrapper in registry.channels):
        raise PluginError(
            "the setting `standby` needs a plugin that continues a lost session on another server, and none is in use: run "
            f"{install_hint('plugins/standby')}. If the setting `plugins` is set, add `standby` to it"
        )


def _wrap_channels(
    settings: Settings,
    registry: Registry,
    opened: tuple[OpenSession, ...],
    context_of: Callable[[OpenSession], ChannelContext],
) -> tuple[OpenSession, ...]:
    """Return the sessions with channels that plugins have wrapped. Closes the sessions if this raises."""
    log_bytes = bytes_of(settings.standby_gib) // max(1, len(opened))
    wrapped = list(opened)
    try:
        for position, one in enumerate(opened):
            context = attrs.evolve(context_of(one), log_bytes=log_bytes)
            for wrapped[position] in _wrappings(settings, registry, one, context):
                pass
    except BaseException:
        for one in wrapped:
            one.close()
        raise
    return tuple(wrapped)


def _wrappings(
    settings: Settings, registry: Registry, one: OpenSession, context: ChannelContext
) -> Iterator[OpenSession]:
    """Yield a session after each wrapper that has wrapped its channel."""
    if context.standby and ENGINE not in settings.standby:  # a wrapper may take any time
        one.connection.limit_reconnect_seconds(settings.standby_seconds)
    for wrapper in sorted(registry.channels, key=lambda wrapper: not wrapper.takes_over):
        try:
            wrapped: object = wrapper.wrap(
                one.connection, context if wrapper.takes_over else attrs.evolve(context, standby=())
            )
        except DjinnError:
            raise
        except Exception as error:
            plugin = registry.owner("channels", wrapper.name)
            raise PluginError(f"{plugin}: wrapping the channel to {context.server} raised {shown(error)}") from error
        if not isinstance(wrapped, ClientChannel):
            plugin, kind = registry.owner("channels", wrapper.name), type(wrapped).__name__
            raise PluginError(f"{plugin}: `wrap` returned a {kind}, not a channel, for {context.server}")
        attached = one.attached
        if wrapped.logged:  # another server lacks this server's cache, so everything is sent, and logged
            attached = msgspec.structs.replace(attached, caches_weights=False)
        one = msgspec.structs.replace(one, connection=wrapped, attached=attached)
        yield one
        if wrapper.takes_over:
            context = attrs.evolve(context, standby=())


def _open_servers(settings: Settings, servers: Sequence[Server]) -> tuple[OpenSession, ...]:
    """Begin a session with each server. If several addresses lead to the same server, begin a single session."""
    opened: list[OpenSession] = []
    failed: list[tuple[str, DjinnError]] = []
    try:
        for server in _in_order(settings, servers):
            if any(
                url in one.addresses and has_transport(url, server.transports) for one in opened for url in server.urls
            ):
                continue  # another address of the same server
            try:
                members, left_out = _open_devices(settings, server, secondary=bool(opened))
            except (TransportError, PluginError) as error:
                reason = error.__cause__
                failed.append((", ".join(server.urls), reason if isinstance(reason, DjinnError) else error))
                continue
            failed += left_out
            instances = {other.attached.instance for other in opened}
            for member in members:
                if member.attached.instance in instances:
                    member.close()
                else:
                    opened.append(member)
        if not opened:
            raise unreachable([error for _, error in failed])
    except BaseException:
        for member in opened:
            member.close()
        raise
    return _with_fallbacks(failed, opened)


def _with_fallbacks(failed: Iterable[tuple[str, DjinnError]], opened: Sequence[OpenSession]) -> tuple[OpenSession, ...]:
    """Return the sessions. The fallbacks of the first session include `failed`."""
    first = opened[0]
    fallbacks = (*[given_up(*pair) for pair in failed], *first.fallbacks)
    return (msgspec.structs.replace(first, fallbacks=fallbacks), *opened[1:])


def _in_order(settings: Settings, servers: Sequence[Server]) -> list[Server]:
    """Return the servers sorted by the speed of their transports, then by load, then at random.

    Device numbers follow this order. If the settings name devices, the configured order is used.
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
    opened, failed = [first], list[tuple[str, DjinnError]]()
    try:
        for number in _matching_devices(welcome, device_names):
            try:
                opened.append(_begin(settings, server, str(number), secondary=True)[0])
            except (TransportError, AccessRefused) as error:
                failed.append((f"device {number} of {server.urls[0]}", error))
    except BaseException:
        for member in opened:
            member.close()
        raise
    return opened, failed


def _matching_devices(welcome: Welcome, wanted: Sequence[str]) -> list[int]:
    """Return the numbers of further devices that match one of `wanted`, in the server's order."""

    def matches(number: int, device: str, name: str) -> bool:
        return not name or name in {str(number), device, device.partition(":")[0]}

    numbers = [n for n, device in enumerate(welcome.devices) if any(matches(n, device, name) for name in wanted)]
    return [number for number in numbers if number != welcome.number]


def _begin(settings: Settings, server: Server, device: str, secondary: bool = False) -> tuple[OpenSession, Welcome]:
    """Begin a session with an executor of `server`. Return the session and the gateway's reply.

    If the server is full, retry for `connect_timeout` seconds.
    """
    reach = partial(reach_executor, server, device, settings.assignment_hint, secondary)
    reached = with_patience(reach, settings.connect_timeout)
    attached, welcome, name = reached.attached, reached.welcome, server_name(server.urls)
    channel: ClientChannel = PlainClientChannel(reached.connection)
    if attached.lease:
        direct = "" if reached.relayed else reached.url
        where = (server, str(welcome.number), direct, welcome.fingerprint, attached.recoverable)
        redial = ServerReconnection(attached.session, attached.secret, attached.instance, *where)
        patience = attached.lease + (STARTING_SECONDS if attached.recoverable else 0.0)
        channel = ResumingConnection(reached.connection, redial, patience, name, settings.parallel_connections)
    opened = OpenSession(channel, attached, reached.url, reached.fallbacks, addresses=welcome.gateway, server=name)
    return opened, welcome


def _compare_torch(opened: OpenSession) -> None:
    ours, theirs = str(torch.__version__), opened.attached.torch
    if ours.partition("+")[0] != theirs.partition("+")[0]:
        _log.warning(
            "client and executor run different torch: ops that the executor lacks are decomposed or refused, and results may differ in the last digits. Install the same version on both sides, such as the executor's here",
            client=ours,
            executor=theirs,
            url=opened.url,
        )


def missing_operators(opened: Sequence[OpenSession]) -> dict[str, str]:
    """Return the ops of this client that a server lacks, each with a text that names the server."""
    missing: dict[str, str] = {}
    for one in opened:
        theirs = one.attached.operators
        if theirs is not None:
            lacks = allowed_operators().difference(theirs)
            missing |= dict.fromkeys(lacks, f"{one.server}, which runs PyTorch {one.attached.torch},")
    return missing


def compare_operators(opened: Sequence[OpenSession]) -> bool:
    """Record which of the client's ops the executors lack, and their custom ops.

    Return True if recorded calls may depend on a change.
    """
    before = port.offered
    port.missing, port.offered = missing_operators(opened), _offered_operators(opened)
    return bool(port.missing) or port.offered != before


def _offered_operators(opened: Sequence[OpenSession]) -> dict[str, str]:
    """Return the custom ops that every executor runs with the same schema, each with that schema."""
    schemas = [{one.name: one.schema for one in session.attached.custom_operators} for session in opened]
    return {
        name: schema for name, schema in schemas[0].items() if all(other.get(name) == schema for other in schemas[1:])
    }


def with_patience(attempt: Callable[[], T], seconds: float) -> T:
    """Call `attempt` until the server is no longer full, for at most `seconds`. Return its result.

    `attempt` must leave nothing behind when it fails.

    Raises:
        ServerBusy: the server stayed full.
    """
    deadline, backoff = time.monotonic() + seconds, Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
    log = _log.warning  # `info` the first time, then `debug`
    while True:
        try:
            return attempt()
        except ServerBusy as busy:
            pause = max(backoff.jittered(), busy.after)
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
        where = (executor, registry.transports, timeout, start)
        redial = EmbeddedReconnection(attached.session, attached.secret, attached.instance, *where)
        patience, name = executor.lease_seconds + start, "the executor of this program"
        channel = ResumingConnection(connection, redial, patience, name, settings.parallel_connections)
    return OpenSession(channel, attached, url, executor=executor)


def open_again(settings: Settings, registry: Registry, executor: EmbeddedExecutor) -> tuple[ClientChannel, Attached]:
    """Begin a session with the executor if its process still runs, or with a replacement.

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
            opened = _open_own(settings, registry, executor)
        except TransportError:  # an executor that is exiting refuses connections, so retry
            if time.monotonic() > deadline:
                raise
            time.sleep(backoff.pause())
        else:
            return opened.connection, opened.attached


def open_inline(settings: Settings) -> OpenSession:
    """Begin a session with an executor that is a thread of this process."""
    connection, ticket = find_starter().begin_inline(settings, client_name())
    return OpenSession(PlainClientChannel(connection), attach(connection, ticket, settings.connect_timeout), "inline")
