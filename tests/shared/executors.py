"""The executor of a session that has one."""

from __future__ import annotations

from djinn.testing import open_session


def only_executor():
    """The client's end of it."""
    (executor,) = open_session().executors.current
    return executor
