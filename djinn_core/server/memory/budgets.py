"""Memory budgets by kind of value and by phase, learned from the memory that runs were seen to use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from djinn_core.ir.profile import DataResidency, ExecutionPhase

WEIGHT, CACHE, ACTIVATION, STATE = "wkao"
KINDS: Final = (ACTIVATION, STATE, WEIGHT, CACHE)  # of several in one storage the last one counts
NAMES: Final = MappingProxyType({WEIGHT: "weights", CACHE: "caches", ACTIVATION: "activations", STATE: "states"})
RESIDENCIES: Final = MappingProxyType({
    WEIGHT: DataResidency.PERSISTENT_WEIGHT,
    CACHE: DataResidency.STATEFUL_KV_CACHE,
    ACTIVATION: DataResidency.EPHEMERAL_ACTIVATION,
    STATE: DataResidency.OPTIMIZER_STATE,
})  # fmt: skip
# Others that clients tell apart, and what they count as: gradients and inputs come and go with a step.
_COUNTED: Final = MappingProxyType({"g": ACTIVATION, "i": ACTIVATION})
_TRAINING: Final = "training"
_PHASES: Final = frozenset(phase.value for phase in ExecutionPhase)
# Shares of the memory until runs were seen.
_ASSUMED: Final = MappingProxyType({
    "llm_prefill": {WEIGHT: 0.5, CACHE: 0.2, ACTIVATION: 0.3, STATE: 0.0},
    "llm_decode": {WEIGHT: 0.5, CACHE: 0.45, ACTIVATION: 0.05, STATE: 0.0},
    _TRAINING: {WEIGHT: 0.2, CACHE: 0.0, ACTIVATION: 0.5, STATE: 0.3},
    "": {WEIGHT: 0.5, CACHE: 0.2, ACTIVATION: 0.3, STATE: 0.0},
})  # fmt: skip
_KEPT: Final = 0.75  # of the shares that were known, when another run is seen


def kind_of(letter: str) -> str:
    """Kind of a value, from the letter that the client gave it."""
    return letter if letter in KINDS else _COUNTED.get(letter, ACTIVATION)


class Budgets:
    """Shares of memory by phase, adjusted to the use by runs."""

    def __init__(self) -> None:
        self._shares: dict[str, dict[str, float]] = {}

    def shares(self, phase: str) -> Mapping[str, float]:
        """Of the memory, by kind; together 1."""
        key = counted_phase(phase)
        return self._shares.get(key) or _ASSUMED.get(key) or _ASSUMED[""]

    def observe(self, phase: str, used: Mapping[str, int]) -> None:
        """A run of that phase used so many bytes of each kind."""
        total = sum(used.values())
        if total:
            known = self.shares(phase)
            self._shares[counted_phase(phase)] = {
                kind: _KEPT * known[kind] + (1 - _KEPT) * used.get(kind, 0) / total for kind in KINDS
            }

    def over(self, phase: str, held: Counter[str], budget: int) -> tuple[str, ...]:
        """The kinds that hold more than their share."""
        shares = self.shares(phase)
        return tuple([kind for kind in KINDS if held[kind] > shares[kind] * budget])


def counted_phase(phase: str) -> str:
    """The phase whose shares count: training is one, and one that is not known is none."""
    return _TRAINING if phase.startswith(_TRAINING) else phase if phase in _PHASES else ""
