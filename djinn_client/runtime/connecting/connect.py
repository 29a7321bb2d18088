"""Opening connections from settings: to a server's gateway and then its executor, or to an embedded executor."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import attrs
import msgspec
import torch

from djinn_client.runtime.connecting.client_channel import ClientChannel
from djinn_client.runtime.connecting.dialling import (
    DialledExecutor,
    ask_loads,
    given_up,
    reach_executor,
    reach_gateway,
    slowness,
    unreachable,
)
from djinn_client.runtime.connecting.local_plugins import check_for_servers
from djinn_client.runtime.connecting.open_session import OpenSession
from djinn_client.runtime.connecting.redialling import resumable_channel
from djinn_client.runtime.connecting.servers import ENGINE, Servers, find_servers, server_tls, standby_servers
from djinn_core.errors import AccessRefused, DjinnError, PluginError, ServerBusy, TransportError
from djinn_core.ir.operators import allowed_operators
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import has_transport, server_name
from djinn_core.protocol.backoff import Backoff
from djinn_core.protocol.tls_transports import travels_bare
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings, unknown_variables
from djinn_core.wire.messages import Attached, Welcome

if TYPE_CHECKING:
    from djinn_client.runtime.standby.connection import StandbyServer
    from djinn_core.registry.embedded_executors import EmbeddedExecutor

LOAD_SECONDS: Final = 3.0  # that a server may take to say how busy it is; it counts as busier than the others then
FIRST_PAUSE_SECONDS: Final = 0.1  # where a server has no room
LONGEST_PAUSE_SECONDS: Final = 3.0
_log = get_logger("djinn.runtime")
T = TypeVar("T")


class _NewSession(msgspec.Struct, frozen=True):
    """A session that has begun on an executor of a server."""

    channel: ClientChannel
    dialled: DialledExecutor
    welcome: Welcome


def open_connections(
    settings: Settings, registry: Registry, executors: Sequence[EmbeddedExecutor] = ()
) -> tuple[OpenSession, ...]:
    """Begin a session with each device of each configured server, or with embedded executors where none is configured.

    Servers that cannot be reached are left out, with a warning, as long as there is one that can.

    Args:
        settings: what is configured.
        registry: has the transports.
        executors: what `start_executors` started for the same settings; they are closed if this raises.

    Raises:
        ConfigurationError: an address or the connection file is malformed, or there is no token.
        PluginError: no transport serves the address; the message names the folder of Djinn's transports. Or a plugin serves
            executors only, and no executor can import it.
        TransportError: no server can be reached.
        AccessRefused: the server does not let this client in.
        StartupError: the executor of this program's own does not start.
    """
    _warn_of_misspelt(os.environ)
    servers = find_servers(settings, registry.transports)
    if servers is not None:
        check_for_servers(settings.plugins)
        opened = _open_first(settings, registry, servers)
        _tell_of(opened, registry)
        return opened
    # Where a server is configured, nothing of what starts executors is imported.
    from djinn_client.runtime.connecting.embedded import open_embedded, open_inline
    from djinn_client.runtime.connecting.starting import start_executors

    if settings.executor == "inline":
        opened = (open_inline(settings),)
    else:
        own = open_embedded(settings, registry, executors or start_executors(settings, registry))
        opened = _stood_by_engine(settings, registry, own)
    _tell_of(opened, registry)
    return opened


def open_more(
    settings: Settings, registry: Registry, joining: Sequence[EmbeddedExecutor] | Servers, known: Sequence[OpenSession]
) -> tuple[OpenSession, ...]:
    """Begin sessions with executors that were started, or with the devices of servers, to join those that are `known`.

    A server that is known by another address is left out. Raises what `open_connections` does.
    """
    if isinstance(joining, Servers):
        found = _open_servers(settings, _reachable(registry, joining), joining)
        instances = {one.attached.instance for one in known}
        new = tuple([one for one in found if one.attached.instance not in instances])
        for one in found:
            if one not in new:
                one.close()
        others = standby_servers(settings, joining.tls)
        opened = _stood_by_others(settings, registry, joining, others, new)
    else:
        from djinn_client.runtime.connecting.embedded import open_embedded

        opened = _stood_by_engine(settings, registry, open_embedded(settings, registry, joining))
    _tell_of(opened, registry)
    return opened


def _tell_of(opened: Sequence[OpenSession], registry: Registry) -> None:
    """Log what a user should know of the sessions that have begun."""
    for member in opened:
        for fallback in member.fallbacks:
            _log.warning(f"fell back from {fallback}", to=member.url)
        _compare_torch(member)
        if travels_bare(member.url, registry.transports):
            _log.warning("everything travels unencrypted, the token included", server=member.url)


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Say which variables are almost settings: where one is misspelt, something else runs than was meant."""
    for variable, meant in unknown_variables(environ).items():
        if meant:
            _log.warning(f"the environment sets {variable}, which means nothing to Djinn: did you mean {meant}?")


def _open_first(settings: Settings, registry: Registry, servers: Servers) -> tuple[OpenSession, ...]:
    """Sessions with the servers that are configured, or, where none can be reached, with one that stands by."""
    every = [servers, *standby_servers(settings, servers.tls)]
    failed: list[DjinnError] = []
    for position, one in enumerate(every):
        try:
            opened = _open_servers(settings, _reachable(registry, one), one)
        except TransportError as error:
            if len(every) == 1:
                raise
            failed.append(error)
            continue
        others = [*every[position + 1 :], *every[:position]]
        fallbacks = tuple(given_up(", ".join(other.urls), error) for other, error in zip(every, failed, strict=False))
        first = msgspec.structs.replace(opened[0], fallbacks=(*fallbacks, *opened[0].fallbacks))
        return _stood_by_others(settings, registry, one, others, (first, *opened[1:]))
    raise unreachable(failed)


def _reachable(registry: Registry, servers: Servers) -> Registry:
    return registry.evolve(transports=servers.transports(registry.transports))


def _stood_by_others(
    settings: Settings, registry: Registry, servers: Servers, others: Sequence[Servers], opened: tuple[OpenSession, ...]
) -> tuple[OpenSession, ...]:
    """The sessions, which other servers may take over where there are some."""

    def candidates(one: OpenSession) -> tuple[str, list[StandbyServer]]:
        known = {one.url, *one.addresses}
        mine = attrs.evolve(
            servers, members=tuple(urls for urls in servers.members if known & {*urls}) or servers.members
        )
        return mine.urls[0], [_candidate(settings, registry, other, one.attached) for other in (*others, mine)]

    return _stood_by(settings, opened, candidates) if others else opened


def _stood_by_engine(
    settings: Settings, registry: Registry, opened: tuple[OpenSession, ...]
) -> tuple[OpenSession, ...]:
    """The sessions with executors of this program's own, which others of their engine or servers may take over."""
    servers = {one.urls: one for one in standby_servers(settings, server_tls(settings))}
    in_order = [*servers.values()]

    def candidates(one: OpenSession) -> tuple[str, list[StandbyServer]]:
        found = [_candidate(settings, registry, other, one.attached) for other in in_order]
        if ENGINE in settings.standby and one.executor is not None:
            from djinn_client.runtime.connecting.embedded import open_again
            from djinn_client.runtime.standby.connection import StandbyServer

            dial = partial(open_again, settings, registry, one.executor)
            found.insert(settings.standby.index(ENGINE), StandbyServer("its engine", one.attached, dial))
        return one.server, found

    return _stood_by(settings, opened, candidates) if settings.standby else opened


def _stood_by(
    settings: Settings,
    opened: tuple[OpenSession, ...],
    candidates: Callable[[OpenSession], tuple[str, list[StandbyServer]]],
) -> tuple[OpenSession, ...]:
    """The sessions, whose frames are logged; `candidates`: by session what its server is called, and what may take it over."""
    from djinn_client.runtime.standby.connection import with_standby  # few sessions have another server that stands by

    try:
        found = [candidates(one) for one in opened]
    except BaseException:
        for one in opened:
            one.close()
        raise
    taken: list[OpenSession] = []
    for one, (name, others) in zip(opened, found, strict=True):
        if ENGINE not in settings.standby:  # which takes as long as it takes
            one.connection.hasten(settings.standby_seconds)
        connection = with_standby(one.connection, name, others, settings, len(opened))
        # Another server does not have what this one caches: everything is sent, and logged.
        attached = msgspec.structs.replace(one.attached, caches_weights=False)
        taken.append(msgspec.structs.replace(one, connection=connection, attached=attached))
    return tuple(taken)


def _candidate(settings: Settings, registry: Registry, servers: Servers, first: Attached) -> StandbyServer:
    from djinn_client.runtime.standby.connection import StandbyServer

    reachable = _reachable(registry, servers)

    def dial() -> tuple[ClientChannel, Attached]:
        device = (settings.server_devices or (settings.device,))[0]
        begun = _dial(settings, reachable, servers.urls, servers.token, device)
        begun.channel.hasten(settings.standby_seconds)
        return begun.channel, begun.dialled.attached

    return StandbyServer(servers.urls[0], first, dial)


def _open_servers(settings: Settings, registry: Registry, servers: Servers) -> tuple[OpenSession, ...]:
    """A session with each server; one that has several addresses is one server."""
    opened: list[OpenSession] = []
    failed: list[tuple[str, DjinnError]] = []
    try:
        for urls in _in_order(settings, registry, servers):
            if any(
                url in member.addresses and has_transport(url, registry.transports) for member in opened for url in urls
            ):
                continue  # another way to the same server
            try:
                members, left_out = _open_remote(settings, registry, urls, servers.token, bool(opened))
            except (TransportError, PluginError) as error:
                reason = error.__cause__
                failed.append((", ".join(urls), reason if isinstance(reason, DjinnError) else error))
                continue
            failed += left_out
            known = {other.attached.instance for other in opened}
            for member in members:
                if member.attached.instance in known:
                    member.connection.close()
                else:
                    opened.append(member)
        if not opened:
            raise unreachable([error for _, error in failed])
    except BaseException:
        for member in opened:
            member.connection.close()
        raise
    fallbacks = tuple(given_up(*pair) for pair in failed)
    return (msgspec.structs.replace(opened[0], fallbacks=(*fallbacks, *opened[0].fallbacks)), *opened[1:])


def _in_order(settings: Settings, registry: Registry, servers: Servers) -> list[tuple[str, ...]]:
    """Addresses of the servers: over the fastest transport first, of equal ones the least busy, which clients reach alike by chance.

    Numbers of devices follow this order, so it is that of the configuration where the settings name some.
    """
    slow = {urls: slowness(urls[0], registry.transports) for urls in servers.members}
    if len(slow) < 2 or not settings.spread or settings.pins or settings.memory_limits:
        return sorted(slow, key=slow.__getitem__)
    loads = ask_loads(slow, servers.token, registry.transports, min(settings.connect_timeout, LOAD_SECONDS))
    return sorted(slow, key=lambda urls: (slow[urls], loads[urls], random.random()))  # noqa: S311 - no secret


def _open_remote(
    settings: Settings, registry: Registry, urls: tuple[str, ...], token: str, secondary: bool
) -> tuple[list[OpenSession], list[tuple[str, DjinnError]]]:
    """A session with each wanted device of one server, and the devices that cannot be had, each with the reason."""
    first, *others = settings.server_devices or (settings.device,)
    begun = _dial(settings, registry, urls, token, first, secondary)
    opened = [_opened(begun, urls)]
    failed: list[tuple[str, DjinnError]] = []
    try:
        for number in _others_wanted(begun.welcome, (first, *others)):
            try:
                another = _dial(settings, registry, urls, token, str(number), secondary=True)
            except (TransportError, AccessRefused) as error:
                failed.append((f"device {number} of {urls[0]}", error))
            else:
                opened.append(_opened(another, urls))
    except BaseException:
        for member in opened:
            member.connection.close()
        raise
    return opened, failed


def _others_wanted(welcome: Welcome, wanted: Sequence[str]) -> list[int]:
    """Numbers of the devices beside that of `welcome` which match one of `wanted`, in the server's order."""

    def matches(number: int, device: str, name: str) -> bool:
        return not name or name in {str(number), device, device.partition(":")[0]}

    found = [n for n, device in enumerate(welcome.devices) if any(matches(n, device, name) for name in wanted)]
    return [number for number in found if number != welcome.number]


def _dial(
    settings: Settings, registry: Registry, urls: tuple[str, ...], token: str, device: str, secondary: bool = False
) -> _NewSession:
    attempt = partial(_dial_once, settings, registry, urls, token, device, secondary)
    return with_patience(attempt, settings.connect_timeout)


def _dial_once(
    settings: Settings, registry: Registry, urls: tuple[str, ...], token: str, device: str, secondary: bool
) -> _NewSession:
    ways, hint = registry.transports, settings.assignment_hint
    gateway = reach_gateway(urls, token, device, ways, settings.connect_timeout, hint, secondary)
    try:
        reached = reach_executor(gateway, registry.transports, settings.connect_timeout)
    except BaseException:
        gateway.connection.close()
        raise
    if reached.connection is not gateway.connection:
        gateway.connection.close()
    number = str(gateway.welcome.number)
    channel = resumable_channel(
        reached, urls, token, number, registry.transports, settings.connect_timeout, settings.parallel_connections
    )
    return _NewSession(channel, reached, gateway.welcome)


def _opened(begun: _NewSession, configured: tuple[str, ...]) -> OpenSession:
    dialled = begun.dialled
    return OpenSession(
        begun.channel,
        dialled.attached,
        dialled.url,
        dialled.fallbacks,
        addresses=begun.welcome.gateway,
        server=server_name(configured),
    )


def _compare_torch(opened: OpenSession) -> None:
    ours, theirs = str(torch.__version__), opened.attached.torch
    if ours.partition("+")[0] != theirs.partition("+")[0]:
        _log.warning(
            "client and executor run different torch: ops that the executor lacks are taken apart or refused, results may differ "
            "in the last digits. Install the same version on both sides, such as the executor's here",
            client=ours,
            executor=theirs,
            url=opened.url,
        )


def missing_operators(opened: Sequence[OpenSession]) -> dict[str, str]:
    """Ops of this client that a server lacks, each with the words for that server."""
    missing: dict[str, str] = {}
    for one in opened:
        theirs = one.attached.operators
        if theirs is not None:
            lacks = allowed_operators().difference(theirs)
            missing |= dict.fromkeys(lacks, f"{one.server}, which runs PyTorch {one.attached.torch},")
    return missing


def with_patience(attempt: Callable[[], T], seconds: float) -> T:
    """Call `attempt`, again while the server has no room, for at most `seconds`; return its result.

    Only for attempts that leave nothing behind where they fail, such as to begin a session.

    Raises:
        ServerBusy: there was no room in all that time.
    """
    deadline, backoff = time.monotonic() + seconds, Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
    log = _log.warning  # the first time; afterwards `debug`
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
