"""The executor of a session that has one."""

from __future__ import annotations

from djinn.testing import open_session


def only_executor():
    """Return the client's end of the only executor."""
    (executor,) = open_session().executors.current
    return executor
