"""Membership of a pool: its executors by number, those that have left, and the successor of each, which has its values."""

from __future__ import annotations

from djinn_client.runtime.session import Session


class Membership:
    """Executors by number, from 0. A number is never given again: executors know each other by it.

    Attributes:
        members: sessions with all executors that there ever were, by number.
        present: numbers of those that are there now, in order. here: the sessions with these, in the same order.
    """

    def __init__(self) -> None:
        self.members: list[Session] = []
        self.present: list[int] = []
        self.here: list[Session] = []
        self._successors: dict[int, int] = {}

    def enter(self, session: Session) -> int:
        """One more executor is there; its number."""
        self.members.append(session)
        self.here = [*self.here, session]
        self.present.append(len(self.members) - 1)
        return self.present[-1]

    @property
    def indexes(self) -> list[int]:
        """Numbers of the executors that the indexes of the device from 1 on stand for."""
        return [self.number_at(index) for index in range(1, len(self.members) + 1)]

    def number_at(self, index: int) -> int:
        """Number of the executor that an index of the device stands for, from 1: where one has left, the one that has its values."""
        number = index - 1
        while number in self._successors:
            number = self._successors[number]
        return number

    def at(self, index: int) -> list[Session]:
        """The session with the executor of an index from 1, or those with all for index 0."""
        return [self.members[self.number_at(index)]] if index else self.here

    def leave(self, number: int, successor: int) -> None:
        """An executor has left; `successor` stands for its index from now on."""
        self.present.remove(number)
        self.here = [self.members[other] for other in self.present]
        self._successors[number] = successor
