"""The memory policy in use, which orders evictions. The built-in one, `next_use`, is in `builtins/memory.py`."""

from __future__ import annotations

import math
from typing import Final

from djinn_core.errors import StartupError
from djinn_core.logs import get_logger
from djinn_core.registry.registry import Registry
from djinn_server.builtins.memory import NextUsePolicy
from djinn_server.hookspecs.memory_policies import EvictionCandidate, MemoryPolicy

_BUILT_IN: Final = NextUsePolicy()
_log = get_logger("djinn.server")


class CheckedPolicy:
    """A memory policy. If it fails, `next_use` replaces it, and one warning names its plugin."""

    def __init__(self, policy: MemoryPolicy = _BUILT_IN, plugin: str = "djinn") -> None:
        self._policy = policy
        self._plugin = plugin
        self._warned = False

    @property
    def name(self) -> str:
        """Name of the policy."""
        return self._policy.name

    def key(self, candidate: EvictionCandidate) -> float:
        """Return the eviction key, or that of `next_use` after a failure."""
        try:
            found = float(self._policy.key(candidate))
            if not math.isnan(found):
                return found
            error = "`key` returned NaN"
        except Exception as raised:
            error = f"`key` raised or returned no number: {raised!r}"
        log, self._warned = (_log.debug if self._warned else _log.warning), True
        log("a memory policy failed: next_use decides in its place", policy=self.name, plugin=self._plugin, error=error)
        return _BUILT_IN.key(candidate)


def chosen_policy(registry: Registry, name: str) -> CheckedPolicy:
    """Return the memory policy called `name`; empty: the built-in one.

    Raises:
        StartupError: no policy has that name; the message lists the policies.
    """
    if name in {"", _BUILT_IN.name}:
        return CheckedPolicy()
    for policy in registry.memory_policies:
        if policy.name == name:
            return CheckedPolicy(policy, registry.owner("memory_policies", name))
    there = ", ".join(sorted({_BUILT_IN.name, *(policy.name for policy in registry.memory_policies)}))
    raise StartupError(
        f"there is no memory policy {name!r} here (memory policies: {there}). They come with plugins, such as plugins/lru of the checkout; "
        "`djinn plugins` shows what is installed"
    )
