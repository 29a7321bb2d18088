"""`djinn_register_memory_policies`: which values are evicted first on an executor with a memory limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.ir.profile import DataResidency, ExecutionPhase


@attrs.frozen
class SessionHints:
    """Hints that all values of a session have in common.

    Attributes:
        session: number of the session on its device.
        idle: True if it has run nothing for some seconds.
        phase: phase of its last program; `UNKNOWN` where its client sent none.
        over_share: kinds of values that hold more memory than the budget of this phase gives them.
    """

    session: int
    idle: bool = False
    phase: ExecutionPhase = ExecutionPhase.UNKNOWN
    over_share: tuple[DataResidency, ...] = ()


@attrs.frozen
class EvictionCandidate:
    """A storage that may be evicted now: no op that is about to run needs it.

    Attributes:
        nbytes: size of the storage.
        residency: kind of its values: weight, KV cache, optimizer state or activation. Gradients and inputs count as
            activations; of several kinds in one storage it is the one that is kept longest.
        session: hints about the session that it belongs to; of several that share it one that is not idle, if there is one.
        outlives: True if values of the session are views of it; False for temporaries of the program that runs.
        next_use: steps (ops) until it is used again, as far as programs can be foreseen; None if no use is.
        last_use: steps since it was made or used last.
        spilled: True if the spill space, or the file that it was read from, has its bytes, so that evicting it writes nothing.
        restore_seconds: predicted time to write it to the spill space (unless `spilled`) and to read it back.
        recompute_seconds: time that the op took which made it; None if it cannot be recomputed.
        serial: number of its newest value; greater numbers were made later. 0 for temporaries.
        sessions: number of sessions with values that are views of it: more than one for weights that they share.
    """

    nbytes: int
    residency: DataResidency
    session: SessionHints
    outlives: bool = True
    next_use: int | None = None
    last_use: int = 0
    spilled: bool = False
    restore_seconds: float = 0.0
    recompute_seconds: float | None = None
    serial: int = 0
    sessions: int = 1


@attrs.frozen
class EvictionContext:
    """A lack of memory, and all that may be evicted.

    Attributes:
        candidates: the storages that may be evicted.
        needed: bytes that have to be freed.
        resident: bytes that are in memory, those that may not be evicted included.
        budget: bytes that tensors may take.
    """

    candidates: tuple[EvictionCandidate, ...]
    needed: int
    resident: int
    budget: int


class MemoryPolicy(ABC):
    """Order evictions on an executor with a memory limit.

    The executor calls the policy that the setting `memory_policy` names each time that it must free memory. The call is on
    the thread that runs the program, and holds the device's turn: return quickly. A policy is pure: the executor evicts,
    spills, reloads and recomputes. If a method raises, or returns a wrong order, `next_use` decides in its place and a
    warning names the plugin.

    Attributes:
        name: unique among memory policies.
    """

    name: str

    @abstractmethod
    def order(self, context: EvictionContext) -> Sequence[int]:
        """Return the positions of all candidates, each once.

        The executor evicts in this order until `needed` bytes are free.
        """

    def recompute(self, candidate: EvictionCandidate) -> bool:
        """Return True to recompute an evicted storage at its next use, False to spill it.

        Called only for storages with `recompute_seconds`. The executor spills a storage in any case if the operands of its
        op are freed before its next use. By default the faster of both is chosen.
        """
        return candidate.recompute_seconds is not None and candidate.recompute_seconds < candidate.restore_seconds


@hookspec
def djinn_register_memory_policies(settings: Any) -> Iterable[MemoryPolicy]:
    """Return the memory policies that this plugin offers.

    Called once in each executor process. The setting `memory_policy` names the one that is used (by default the built-in
    `next_use`), on executors with a memory limit alone. One that raises, or returns anything but an order of all
    candidates, is replaced by `next_use` for that decision, with a warning that names its plugin.
    """
    del settings
    raise NotImplementedError
