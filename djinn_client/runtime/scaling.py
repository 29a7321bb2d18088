"""`djinn.scale`: executors join the open session, and leave it, while the program goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from djinn_client.interception.dispatch import forget_calls
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.runtime_interface import Runtime, port
from djinn_client.interception.tensors.storage import live_values
from djinn_client.runtime import client
from djinn_client.runtime.client import context
from djinn_client.runtime.connecting.connect import missing_operators, open_more
from djinn_client.runtime.connecting.open_session import OpenSession
from djinn_client.runtime.connecting.servers import Servers, find_servers
from djinn_client.runtime.connecting.starting import start_executors
from djinn_client.runtime.planning.session_planner import new_planner
from djinn_client.runtime.pool.pool_session import PoolSession
from djinn_client.runtime.session import Session
from djinn_client.tracebacks import for_users
from djinn_core.errors import ConfigurationError, DjinnError
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import server_name
from djinn_core.settings import resolve
from djinn_core.system.gc_pause import collect_later

_log = get_logger("djinn.client")


@for_users
def scale(executors: int | None = None, servers: Sequence[str] | None = None) -> None:
    """Have as many executors work for the open session, or these servers; begins a session where none is open.

    Executors that join are started and their links measured; those that leave, the last to join first, do so when the others have
    what they hold. Tensors stay what they are, and programs are planned anew. Other threads of the program go on meanwhile, but for
    the moment in which values move. Where it raises, the session has the executors that it had, except for `SessionLost`.

    Args:
        executors: how many, of those that this program starts for itself on this machine or with an engine.
        servers: URLs or log-ins of all servers that are to work for the session, as in `configure`.

    Raises:
        ConfigurationError: neither or both are given, or the session has executors of the other kind.
        StartupError, TransportError, AccessRefused: those that are to join cannot be had.
        DoesNotFit: those that would stay have no memory for what the others hold.
        UnsupportedOperation: an executor that is to leave holds what cannot go elsewhere.
        SessionLost: an executor was lost, and its values with it.
    """
    given = {"executors": executors} if servers is None else {"servers": tuple(servers)}
    if (executors is None) == (servers is None):
        raise ConfigurationError("djinn.scale() takes `executors`, how many there are to be, or `servers`, which ones")
    with collect_later, context.lock:
        if is_new := not client.is_initialized():
            client.configure(**given)
        else:
            _scale(given)
    if is_new:
        client.init()  # without the lock, for which threads of hooks may wait


def _scale(given: Mapping[str, Any]) -> None:
    """As `scale`, of the open session, by the settings that are `given`. The caller holds the context's lock."""
    executors = given.get("executors")
    resolved = resolve({**context.overrides, **given}).settings
    _check(executors)
    if executors is not None:
        _scale_to(resolved.executors)
    else:
        found = find_servers(resolved, client.registry().transports)
        if found is None:
            raise ConfigurationError("djinn.scale(servers=[]) leaves no executor: name the servers that stay")
        _scale_over(found)
    context.overrides = {**context.overrides, **given}
    context.settings = resolved


def _check(executors: int | None) -> None:
    settings = client.settings()
    if settings.executor == "inline":
        raise ConfigurationError(
            "an executor that is a thread of the program stays the only one: executor='inline' does not scale"
        )
    own = all(one.executor is not None for one in context.opened)
    if executors is not None and not own:
        raise ConfigurationError(
            "the executors of a server are started there: djinn.scale(servers=[...]) says which servers work for the session"
        )
    if executors is None and own:
        raise ConfigurationError(
            "this session has executors of its own, which values do not leave for servers: djinn.scale(executors=...) says how many"
        )


def _scale_to(count: int) -> None:
    """Have `count` executors of this program's own."""
    opened = context.opened
    if count > len(opened):
        with numbers_for(count - len(opened)) as numbers:
            join(start_executors(client.settings(), client.registry(), numbers))
    elif count < len(opened):
        leave(opened[count:])


@contextlib.contextmanager
def numbers_for(count: int) -> Iterator[tuple[int, int]]:
    """The first of as many numbers, and how many, for executors that are started in the block: no other executor has or gets one of them."""
    with context.lock:
        session = context.session
        members = len(session.members) if isinstance(session, PoolSession) else len(context.opened)
        taken = {one.executor.number for one in context.opened if one.executor is not None} | context.joining
        first = max([members, *(number + 1 for number in taken)])
        numbers = range(first, first + count)
        context.joining.update(numbers)
    try:
        yield first, count
    finally:
        with context.lock:
            context.joining.difference_update(numbers)


def _scale_over(wanted: Servers) -> None:
    """Have these servers, and no others."""
    known = context.opened
    members = {urls: [one for one in known if _is_at(one, urls)] for urls in wanted.members}
    more = tuple(urls for urls, found in members.items() if not found)
    if more:
        join(attrs.evolve(wanted, members=more))
    joined = context.opened[len(known) :]
    staying = [one for found in members.values() for one in found]
    try:
        if leaving := [one for one in known if one not in staying]:
            leave(leaving)
    except DjinnError:
        if joined and client.is_initialized():
            leave(joined)
        raise


def _is_at(one: OpenSession, urls: tuple[str, ...]) -> bool:
    return one.server == server_name(urls) or not {one.url, *one.addresses}.isdisjoint(urls)


def join(joining: Any) -> None:
    """Have executors that were started, or servers, join the open session. The caller holds the context's lock.

    Raises:
        DjinnError: they cannot; the session goes on as it was, and they are closed.
    """
    settings = client.settings()
    join_opened(open_more(settings, client.registry(), joining, context.opened))


def join_opened(more: tuple[OpenSession, ...]) -> None:
    """As `join`, of sessions that have begun."""
    try:
        current().asked(lambda session: _join(session, more))
    except BaseException:
        for one in more:
            one.close()
        raise
    _log.info("executors have joined", executors=len(context.opened), joined=[one.server for one in more])


def _join(session: Runtime, more: tuple[OpenSession, ...]) -> None:
    if isinstance(session, PoolSession):
        session.join(more)
    elif isinstance(session, Session):
        _make_pool(session, more)
    opened = context.opened = (*context.opened, *more)
    assert isinstance(context.session, PoolSession)
    client.calibrate(context.session, opened)
    port.missing = missing_operators(opened)
    if port.missing:
        forget_calls()


def _make_pool(session: Session, more: tuple[OpenSession, ...]) -> None:
    """Put a pool in the place of a session with one executor, which is the first of the pool."""
    try:
        pool = client.new_pool((*context.opened, *more), session)
    except BaseException:
        session.plan_by(new_planner(context, 1))
        raise
    session.successor = context.session = pool
    pool.executors.know_values(live_values())
    pool.free_on(0, session.submissions.take_derived())


def leave(leaving: Sequence[OpenSession]) -> None:
    """Have executors leave the open session, when the others have what they hold. The caller holds the context's lock.

    Raises:
        DjinnError: they cannot; as `scale`.
    """
    session = context.session
    assert isinstance(session, PoolSession), "an executor that leaves leaves others"
    numbers = [number for number, one in zip(session.membership.present, context.opened, strict=True) if one in leaving]

    def left(_: Runtime) -> None:
        session.leave(numbers)
        context.opened = tuple([one for one in context.opened if one not in leaving])

    current().asked(left)
    context.closed = (
        context.closed[0] + sum(one.connection.bytes_sent for one in leaving),
        context.closed[1] + sum(one.connection.bytes_received for one in leaving),
    )
    for one in leaving:
        if one.executor is not None:
            one.executor.close()
    _log.info("executors have left", executors=len(context.opened), left=[one.server for one in leaving])
