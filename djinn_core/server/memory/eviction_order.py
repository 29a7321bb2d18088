"""Eviction order among values that outlive the program that runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

from djinn_core.server.memory.allocation import Allocation
from djinn_core.server.memory.budgets import ACTIVATION, CACHE, KINDS, Budgets

if TYPE_CHECKING:
    from djinn_core.server.memory.session import SessionMemory

Order = Callable[[Allocation], Any]  # what is greater goes first
FAR: Final = 1 << 40  # steps: used again after everything that can be foreseen, if at all

# What the order begins with: caches of sessions that rest, their other values, all others, and last caches in use.
RESTING_CACHE, RESTING, USUAL, PINNED = 3, 2, 1, 0


def between_programs(
    sessions: Collection[SessionMemory], holdings: Iterable[Allocation], now: float, budgets: Budgets, budget: int
) -> Order:
    """By session at rest or not, then by the next use, then by kinds that hold more than their share, then by kind."""
    distances = {id(session): session.foresight.distances() for session in sessions}
    held: Counter[str] = Counter()
    for holding in holdings:
        held[kind_of_holding(holding)] += holding.nbytes
    over = {id(session): budgets.over(session.phase, held, budget) for session in sessions}

    def order(holding: Allocation) -> Any:
        session = holding.owner
        if session is None:
            return (USUAL, 0, False, 0, 0)
        ahead, kind = distances[id(session)], kind_of_holding(holding)
        nearest = min((ahead.get(session.foresight.role(h), FAR) for h in holding.handles), default=FAR)
        level = _level(session.idle(now), kind)
        return (level, nearest, kind in over[id(session)], -KINDS.index(kind), max(holding.handles, default=0))

    return order


def _level(idle: bool, kind: str) -> int:
    if idle:
        return RESTING_CACHE if kind == CACHE else RESTING
    return PINNED if kind == CACHE else USUAL


def kind_of_holding(holding: Allocation) -> str:
    """Kind of the values that are views of it; an activation where the client did not give one."""
    if holding.owner is None:
        return ACTIVATION
    return holding.owner.kind(holding.handles)
