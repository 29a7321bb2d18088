"""Eviction decisions: asks the memory policy what to evict first, and names its plugin where it fails.

The built-in policy, `next_use`, is in `builtins/memory.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from djinn_core.errors import StartupError
from djinn_core.hookspecs.memory_policies import EvictionCandidate, EvictionContext, MemoryPolicy, SessionHints
from djinn_core.ir.profile import ExecutionPhase
from djinn_core.logs import get_logger
from djinn_core.registry.registry import Registry
from djinn_server.builtins.memory import NextUsePolicy
from djinn_server.memory.allocation import Allocation
from djinn_server.memory.budgets import ACTIVATION, KINDS, RESIDENCIES, Budgets

if TYPE_CHECKING:
    from djinn_server.memory.session_memory import SessionMemory

_BUILT_IN: Final = NextUsePolicy()
_PHASES: Final = {phase.value: phase for phase in ExecutionPhase}
_log = get_logger("djinn.server")


class Decider:
    """The memory policy in use. Where it fails, the built-in one decides in its place, and a warning names its plugin."""

    def __init__(self, policy: MemoryPolicy = _BUILT_IN, plugin: str = "djinn") -> None:
        self._policy = policy
        self._plugin = plugin
        self._told: set[str] = set()

    @property
    def name(self) -> str:
        """Name of the policy."""
        return self._policy.name

    def order(self, context: EvictionContext) -> Sequence[int]:
        """As `MemoryPolicy.order`."""
        try:
            found = self._policy.order(context)
            count = len(context.candidates)
            if sorted(found) == list(range(count)):
                return found
            error = f"`order` returned {len(found)} positions that are not each of the {count} candidates once"
        except Exception as raised:
            error = f"`order` raised {raised!r}"
        self._tell(error)
        return _BUILT_IN.order(context)

    def recompute(self, candidate: EvictionCandidate) -> bool:
        """As `MemoryPolicy.recompute`."""
        try:
            return bool(self._policy.recompute(candidate))
        except Exception as raised:
            self._tell(f"`recompute` raised {raised!r}")
            return _BUILT_IN.recompute(candidate)

    def _tell(self, error: str) -> None:
        """Warn once of each error: a policy is asked many times a second."""
        log = _log.debug if error in self._told else _log.warning
        if len(self._told) < 100:
            self._told.add(error)
        log(
            "a memory policy failed: the built-in one decides in its place",
            policy=self.name,
            plugin=self._plugin,
            error=error,
        )


def decider(registry: Registry, name: str) -> Decider:
    """The memory policy called `name`; empty: the built-in one.

    Raises:
        StartupError: there is none of that name; the message says which there are.
    """
    if name in {"", _BUILT_IN.name}:
        return Decider()
    for policy in registry.memory_policies:
        if policy.name == name:
            return Decider(policy, registry.owner("memory_policies", name))
    there = ", ".join(sorted({_BUILT_IN.name, *(policy.name for policy in registry.memory_policies)}))
    raise StartupError(
        f"there is no memory policy {name!r} here (memory policies: {there}). They come with plugins, such as plugins/lru of the checkout; "
        "`djinn plugins` shows what is installed"
    )


class Hints:
    """Hints about the values of a device's sessions, as they were when this was made."""

    def __init__(
        self,
        sessions: Collection[SessionMemory],
        holdings: Iterable[Allocation],
        now: float,
        step: int,
        budgets: Budgets,
        budget: int,
    ) -> None:
        """`now`: seconds; `step`: how many steps the device has run."""
        held: Counter[str] = Counter()
        for holding in holdings:
            held[kind_of_holding(holding)] += holding.nbytes
        self._step = step
        self._distances = {id(session): session.predictor.distances() for session in sessions}
        self._sessions = {
            id(session): SessionHints(
                number,
                session.idle(now),
                _PHASES.get(session.phase, ExecutionPhase.UNKNOWN),
                tuple([RESIDENCIES[kind] for kind in budgets.over(session.phase, held, budget)]),
            )
            for number, session in enumerate(sessions)
        }

    def of(self, holding: Allocation) -> SessionHints:
        """Hints about the session of a holding; of several that share it, those about one that is not idle, if there is one."""
        return min((self._sessions[id(session)] for session in holding.holders), key=lambda hints: hints.idle)

    def of_session(self, session: SessionMemory) -> SessionHints:
        """Hints about a session."""
        return self._sessions[id(session)]

    def next_use(self, holding: Allocation) -> int | None:
        """Steps from the end of the last program that began to the next use of sessions' values; None: not foreseen."""
        uses: list[int] = []
        for session, handles in holding.holders.items():
            ahead = self._distances[id(session)]
            uses += [ahead[found] for handle in handles if (found := session.predictor.role(handle)) in ahead]
        return min(uses, default=None)

    def last_use(self, holding: Allocation) -> int:
        """Steps from the last use of sessions' values to when this was made."""
        uses = (session.uses.last(handles, self._step) for session, handles in holding.holders.items())
        return self._step - max(uses, default=self._step)


def kind_of_holding(holding: Allocation) -> str:
    """Kind of the values that are views of it, the one that is kept longest; an activation where no client gave one."""
    kinds = [session.kind(handles) for session, handles in holding.holders.items()]
    return max(kinds, key=KINDS.index, default=ACTIVATION)
