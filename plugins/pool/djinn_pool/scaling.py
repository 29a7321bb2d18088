"""`djinn.scale`: let executors join and leave the open session while the program runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from djinn_client.interception.recording.recorder import current
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime import client
from djinn_client.runtime.connecting.open import OpenSession, open_more, update_offered_operators
from djinn_client.runtime.connecting.own_executor import start_executors
from djinn_client.runtime.connecting.servers import Servers, find_servers
from djinn_client.runtime.context import context
from djinn_client.runtime.planning.session_planner import PLANNING
from djinn_client.tracebacks import for_users
from djinn_core.errors import ConfigurationError
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import server_name
from djinn_core.settings import resolve
from djinn_core.system.gc_pause import collect_later

if TYPE_CHECKING:
    from djinn_core.registry.embedded_executors import EmbeddedExecutor

_log = get_logger("djinn.client")


@for_users
def scale(executors: int | None = None, servers: Sequence[str] | None = None) -> None:
    """Set the number of executors, or the servers, of the open session. If no session is open, begin one.

    New executors are started, and their links are measured. Executors that joined last leave first, after their values
    have moved to the others. Tensors stay valid, and programs are planned again. Other threads of the program continue,
    except while values move. After an error other than `SessionLost`, the session has its previous executors. After an
    interrupt, new executors may have joined.

    Args:
        executors: number of executors, for a program that starts its executors itself.
        servers: URLs or log-ins of all servers of the session, as in `configure`.

    Raises:
        ConfigurationError: neither or both arguments are given, or the argument does not fit the session's executors.
        StartupError, TransportError, AccessRefused: a new executor cannot be started or reached.
        DoesNotFit: the remaining executors have too little memory for the values of the leaving executors.
        UnsupportedOperation: a leaving executor holds a value that cannot move.
        SessionLost: an executor was lost, and its values with it.
    """
    options = {"executors": executors} if servers is None else {"servers": tuple(servers)}
    if (executors is None) == (servers is None):
        raise ConfigurationError(
            "djinn.scale() takes one argument: `executors`, the number of executors, or `servers`, the servers of the session"
        )
    with collect_later, context.lock:
        if is_new := not context.is_open:
            client.configure(**options)
        else:
            _scale(options)
    if is_new:
        client.init()  # without the lock, because threads of hooks may wait for it


def _scale(changes: Mapping[str, Any]) -> None:
    """Scale the open session to the settings `changes`. The caller holds the context's lock."""
    executors = changes.get("executors")
    new_settings = resolve({**context.overrides, **changes}).settings
    _check(executors)
    servers_found = None if executors is not None else find_servers(new_settings, client.registry().transports)
    if executors is None and servers_found is None:
        raise ConfigurationError("djinn.scale(servers=[]) would leave no executor: name at least one server")
    before, is_done = context.opened, False
    try:
        if servers_found is None:
            _scale_to(new_settings.executors)
        else:
            _scale_over(servers_found)
        is_done = True
    finally:
        if is_done or (context.is_open and context.opened != before):  # Ctrl-C may arrive after the change
            context.overrides = {**context.overrides, **changes}
            context.settings = new_settings


def _check(executors: int | None) -> None:
    settings = client.settings()
    if settings.executor == "inline":
        raise ConfigurationError(
            "djinn.scale() cannot scale executor='inline', which runs in a thread of this program: use executor='process'"
        )
    own = all(session.executor is not None for session in context.opened)
    if executors is not None and not own:
        raise ConfigurationError("the executors of this session run on servers: use djinn.scale(servers=[...])")
    if executors is None and own:
        raise ConfigurationError(
            "the values of this program's own executors cannot move to servers: use djinn.scale(executors=...)"
        )


def _scale_to(count: int) -> None:
    """Scale to `count` executors that this program starts."""
    sessions = context.opened
    if count > len(sessions):
        with numbers_for(count - len(sessions)) as numbers:
            join(_open(start_executors(client.settings(), client.registry(), numbers)))
    elif count < len(sessions):
        leave(sessions[count:])


def _scale_over(servers: Servers) -> None:
    """Scale to exactly the servers `servers`."""
    before = context.opened
    members = {urls: [session for session in before if _is_at(session, urls)] for urls in servers.members}
    new_servers = tuple(urls for urls, numbers in members.items() if not numbers)
    staying = [session for numbers in members.values() for session in numbers]
    leaving = [session for session in before if session not in staying]
    try:
        if new_servers:
            join(_open(attrs.evolve(servers, members=new_servers)))
        if leaving:
            leave(leaving)
    except BaseException:
        new = [session for session in context.opened if session not in before]
        if new and context.is_open and any(session in context.opened for session in leaving):
            leave(new)
        raise


def _open(joining: Sequence[EmbeddedExecutor] | Servers) -> tuple[OpenSession, ...]:
    """Begin sessions with executors that were started, or with servers."""
    registry, settings = context.configured()
    return open_more(settings, registry, joining, context.opened)


def _is_at(one: OpenSession, urls: tuple[str, ...]) -> bool:
    return one.server == server_name(urls) or not {one.url, *one.addresses}.isdisjoint(urls)


# --- joining and leaving ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def numbers_for(count: int) -> Iterator[tuple[int, int]]:
    """Reserve `count` consecutive numbers for executors that start in the block. Yield the first number and `count`."""
    with context.lock:
        assert context.session is not None
        members = len(context.session.executors.members)
        numbers_in_use = {
            session.executor.number for session in context.opened if session.executor is not None
        } | context.joining
        first = max([members, *(number + 1 for number in numbers_in_use)])
        numbers = range(first, first + count)
        context.joining.update(numbers)
    try:
        yield first, count
    finally:
        with context.lock:
            context.joining.difference_update(numbers)


def join(sessions: tuple[OpenSession, ...]) -> None:
    """Add the executors of the begun sessions `sessions` to the open session. The caller holds the context's lock.

    Raises:
        DjinnError: the executors cannot join. They are closed, and the session continues without them.
        KeyboardInterrupt: as for `DjinnError`. But executors that had already joined stay in the session.
    """
    try:
        # Without the sink's lock: a plugin may use the device while it is imported.
        context.configured()[0].load("routers", *PLANNING)
        current().send_then(lambda: _join(sessions))
    except BaseException:
        members = context.opened
        for session in sessions:
            if session not in members:  # if the interrupt came after the join, the executor may hold values
                session.close()
        raise
    _log.info("executors have joined", executors=len(context.opened), joined=[session.server for session in sessions])


def _join(sessions: tuple[OpenSession, ...]) -> None:
    assert context.session is not None
    context.session.join(sessions)
    if update_offered_operators(context.opened):
        port.interception.reconsider()


def leave(leaving: Sequence[OpenSession]) -> None:
    """Move the values of executors to the others, then remove these executors. The caller holds the context's lock.

    Raises:
        DjinnError: the executors cannot leave, for the reasons that `scale` lists.
    """
    session = context.session
    assert session is not None
    executors = session.executors
    numbers = [number for number in executors.present if executors.members[number].opened in leaving]
    current().send_then(lambda: session.router.leave(numbers))
    context.ended_bytes = (
        context.ended_bytes[0] + sum(one.connection.bytes_sent for one in leaving),
        context.ended_bytes[1] + sum(one.connection.bytes_received for one in leaving),
    )
    for one in leaving:
        if one.executor is not None:
            one.executor.close()
    _log.info("executors have left", executors=len(context.opened), left=[one.server for one in leaving])
