"""Passing frames on between two connections, without looking at them."""

from __future__ import annotations

import threading

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.logs import get_logger

_log = get_logger("djinn.server")


def relay(client: Connection, executor: Connection) -> None:
    """Pass frames on both ways until either side ends, then close both.

    A sender that is faster than its receiver is slowed down, because `send` waits.
    """
    back = threading.Thread(target=_pass_on, args=(executor, client, "executor"), name="djinn-relay", daemon=True)
    back.start()
    _pass_on(client, executor, "client")
    back.join()


def _pass_on(source: Connection, target: Connection, name: str) -> None:
    try:
        while True:
            target.send(source.receive())
    except ProtocolError as error:
        _log.warning("a relayed connection broke the protocol", source=name, error=str(error))
    except TransportError as error:
        _log.debug("a relayed connection ended", source=name, error=str(error))
    finally:
        source.close()
        target.close()
