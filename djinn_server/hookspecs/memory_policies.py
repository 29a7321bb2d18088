"""`djinn_register_memory_policies`: which values are evicted first on an executor with a memory limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec


@attrs.frozen
class EvictionCandidate:
    """A storage that may be evicted now: the op that is about to run does not need it.

    Attributes:
        nbytes: size of the storage.
        last_use: steps (ops) since it was made or used last.
        next_use: steps until it is used again. The program that runs tells it exactly. Later uses are predicted: as many steps after its
            last use as the time before, or 10,000 for its first time. None if it was not used when that was predicted.
    """

    nbytes: int
    last_use: int = 0
    next_use: int | None = None


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
