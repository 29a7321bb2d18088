"""Replace executors on nodes that their engine drains: the executors leave the session, and new executors join it."""

from __future__ import annotations

import threading
from typing import Final

from djinn_client.interception import interpreter_shutdown
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime.connecting.open import OpenSession, open_more
from djinn_client.runtime.connecting.own_executor import start_executors
from djinn_client.runtime.context import context
from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger
from djinn_core.registry.loading import shown
from djinn_pool import scaling

LOOK_SECONDS: Final = 2.0
_log = get_logger("djinn.client")


def watch() -> None:
    """Start a thread that replaces executors of the open session when their engine announces that it drains their node."""
    registry, settings = context.configured()
    plugin = registry.owner("executors", settings.engine)
    threading.Thread(target=_watch_nodes, args=(plugin,), name="djinn-places", daemon=True).start()


def _watch_nodes(plugin: str) -> None:
    """Replace executors on drained nodes until the session ends. `plugin`: name of the engine's plugin, for messages."""
    session_number, pause = port.sessions_ended, threading.Event()
    notified: list[OpenSession] = []
    while not pause.wait(LOOK_SECONDS):
        if not _is_same_session(session_number):
            return
        notified = [session for session in notified if session in context.opened]
        for session in context.opened:
            if session not in notified and (reason := _notice(session, notified, plugin)):
                notified.append(session)
                _log.warning("an executor leaves, because the engine drains its node", reason=reason)
                try:
                    _replace(session)
                except DjinnError as error:
                    _log.error(
                        "an executor on a drained node cannot leave the session, its values will be lost",
                        error=str(error),
                    )


def _notice(session: OpenSession, failed_sessions: list[OpenSession], plugin: str) -> str:
    """Return why the engine drains an executor's node, or an empty string.

    If its handle raises, append `session` to `failed_sessions`, so that it is not asked again. `plugin`: for the log.
    """
    if session.executor is None:
        return ""
    try:
        return session.executor.notice()
    except Exception as error:
        failed_sessions.append(session)
        _log.warning(
            "the engine failed to report drained nodes and is not asked again", plugin=plugin, error=shown(error)
        )
        return ""


def _is_same_session(ended_sessions: int) -> bool:
    """Return True while the session is open that began when `ended_sessions` sessions had ended."""
    return port.sessions_ended == ended_sessions and port.is_open() and not interpreter_shutdown.has_begun()


def _replace(one: OpenSession) -> None:
    """Replace an executor.

    If its values fit on the other executors, it leaves first. Otherwise the replacement joins first.

    Raises:
        DjinnError: the executor cannot leave, or the session is lost.
    """
    has_left = False
    if len(context.opened) > 1:
        try:
            has_left = _leave(one)
        except DjinnError as error:
            _log.info("an executor cannot leave before its replacement has joined", reason=str(error))
    try:
        (registry, settings), session_number = context.configured(), port.sessions_ended
        with scaling.numbers_for(1) as numbers:
            new_sessions = open_more(settings, registry, start_executors(settings, registry, numbers), context.opened)
            with context.lock:
                if port.sessions_ended != session_number:
                    for session in new_sessions:
                        session.close()
                    return  # the session has ended meanwhile
                scaling.join(new_sessions)
    except DjinnError as error:
        _log.warning("an executor on a drained node was not replaced: add one with djinn.scale()", error=str(error))
        if not has_left:
            raise
    if not has_left:
        _leave(one)


def _leave(one: OpenSession) -> bool:
    """Remove an executor, unless it has already left. Return False if it must stay, because it is the only executor."""
    with context.lock:
        if one in context.opened:
            if len(context.opened) < 2:
                return False
            scaling.leave([one])
    return True
