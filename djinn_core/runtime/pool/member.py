"""The client's end of a session with one executor of several: while it waits for this one, it looks after the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from djinn_core.runtime.session import Session

LOOK_SECONDS: Final = 0.2  # of a wait, after which it is looked at the others


class Member(Session):
    """A session of a pool.

    An executor that waits for a value of another one says nothing, and if that other one has died, no thread reads the connection
    that says so: the thread that waits for the first one reads it.
    """

    others: Sequence[Member] = ()

    def _receive_one(self, timeout: float) -> bool:
        if super()._receive_one(min(timeout, LOOK_SECONDS)):
            return True
        if timeout:
            for other in self.others:
                other.look()
        return False

    def look(self) -> None:
        """Take in what is there, unless another thread does; a connection that broke is dialled again.

        Raises:
            SessionLost: the executor is gone.
        """
        self._take_in_while(lambda: True)


def acquaint(members: Sequence[Member]) -> None:
    """Have each of them look after the others."""
    for member in members:
        member.others = tuple(other for other in members if other is not member)
