"""`djinn_register_memory_policies`: which values are evicted first on an executor with a memory limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.ir.profile import DataResidency


@attrs.frozen
class EvictionCandidate:
    """A storage that may be evicted now: the op that is about to run does not need it.

    Attributes:
        nbytes: size of the storage.
        last_use: steps (ops) since it was made or used last.
        next_use: steps until it is used again. The program that runs tells it exactly. Later uses are predicted: as many steps after its
            last use as the time before, or 10,000 for its first time. None if it was not used when that was predicted.
        residency: kind of its values: weight, KV cache, optimizer state or activation. Of several kinds, the one that is kept longest.
        outlives: True if values of a session are views of it; False for temporaries of the program that runs.
        spilled: True if its bytes are on the host, on disk or in a file as well, so that evicting it writes nothing.
        sessions: number of sessions with values that are views of it: more than one for weights that they share.
    """

    nbytes: int
    last_use: int = 0
    next_use: int | None = None
    residency: DataResidency = DataResidency.EPHEMERAL_ACTIVATION
    outlives: bool = True
    spilled: bool = False
    sessions: int = 1


class MemoryPolicy(ABC):
    """Order evictions on an executor with a memory limit.

    The executor uses the policy that the setting `memory_policy` names. It calls `key` for each storage when it must free memory, on
    the thread that runs the program: return quickly. A policy is pure: the executor evicts, spills and restores. If `key` raises or
    returns something other than a number, `next_use` decides in its place and a warning names the plugin.

    Attributes:
        name: unique among memory policies.
    """

    name: str

    @abstractmethod
    def key(self, candidate: EvictionCandidate) -> float:
        """Return a number for a storage. The executor evicts those with the greatest numbers first."""


@hookspec
def djinn_register_memory_policies(settings: Any) -> Iterable[MemoryPolicy]:
    """Return the memory policies that this plugin offers.

    Called once in each executor process. The setting `memory_policy` names the one that is used (by default the built-in
    `next_use`). If its key raises, `next_use` decides for that storage, with a warning that names the plugin.
    """
    del settings
    raise NotImplementedError
