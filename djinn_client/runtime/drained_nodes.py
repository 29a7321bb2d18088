"""Replacement of executors whose engine takes their place away, as when it drains a node: they leave the session first, and new ones join it."""

from __future__ import annotations

import threading
from typing import Final

from djinn_client.interception import interpreter_shutdown
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime import client, scaling
from djinn_client.runtime.client import context
from djinn_client.runtime.client_session import ClientSession
from djinn_client.runtime.connecting.connect import open_more
from djinn_client.runtime.connecting.open_session import OpenSession
from djinn_client.runtime.connecting.starting import start_executors
from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger

LOOK_SECONDS: Final = 2.0
_log = get_logger("djinn.client")


def watch() -> None:
    """Watch the executors of the open session, if their engine gives notice before it takes a place away."""
    threading.Thread(target=_look, name="djinn-places", daemon=True).start()


def _look() -> None:
    """Look at all executors now and then, as long as the session lasts."""
    session, pause = context.session, threading.Event()
    told: list[OpenSession] = []
    while not pause.wait(LOOK_SECONDS):
        if session is None or not _goes_on(session):
            return
        session = session.successor or session
        told = [one for one in told if one in context.opened]
        for one in context.opened:
            if one not in told and (reason := _notice(one, told)):
                told.append(one)
                _log.warning("an executor loses its place, and leaves the session", reason=reason)
                try:
                    _give_way(one)
                except DjinnError as error:
                    _log.error("an executor that loses its place cannot leave the session", error=str(error))


def _notice(one: OpenSession, told: list[OpenSession]) -> str:
    """Return the engine's reason to drain an executor's node, or an empty text. Ignore an engine after it has raised."""
    if one.executor is None:
        return ""
    try:
        return one.executor.notice()
    except Exception as error:
        told.append(one)
        _log.warning("an engine failed to report drained nodes", server=one.server, error=repr(error))
        return ""


def _goes_on(session: ClientSession) -> bool:
    return not (session.lost or port.forked or interpreter_shutdown.has_begun())


def _give_way(one: OpenSession) -> None:
    """Have an executor leave, before or after there is another one in its place.

    Raises:
        DjinnError: it cannot leave, or the session is lost.
    """
    has_left = False
    if len(context.opened) > 1:
        try:
            has_left = _leave(one)
        except DjinnError as error:
            _log.info("an executor leaves once there is another one", reason=str(error))
    try:
        settings, registry, session = client.settings(), client.registry(), context.session
        with scaling.numbers_for(1) as numbers:
            more = open_more(settings, registry, start_executors(settings, registry, numbers), context.opened)
            with context.lock:
                if context.session is not session and (session is None or context.session is not session.successor):
                    for other in more:
                        other.close()
                    return  # the session has ended meanwhile
                scaling.join_opened(more)
    except DjinnError as error:
        _log.warning(
            "there is no executor in the place of one that leaves: djinn.scale() starts another", error=str(error)
        )
        if not has_left:
            raise
    if not has_left:
        _leave(one)


def _leave(one: OpenSession) -> bool:
    """True if it has left; False while it is the only one."""
    with context.lock:
        if one in context.opened:
            if len(context.opened) < 2:
                return False
            scaling.leave([one])
    return True
