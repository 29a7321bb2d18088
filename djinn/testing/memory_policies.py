"""The suite for memory policies, and decisions to try them on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy

import attrs
import pytest

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.hookspecs.memory_policies import EvictionCandidate, EvictionContext, MemoryPolicy, SessionHints
from djinn_core.ir.profile import DataResidency, ExecutionPhase

_KINDS = (
    DataResidency.PERSISTENT_WEIGHT,
    DataResidency.STATEFUL_KV_CACHE,
    DataResidency.OPTIMIZER_STATE,
    DataResidency.EPHEMERAL_ACTIVATION,
)
_MIB = 1 << 20


def sample_evictions() -> dict[str, EvictionContext]:
    """Decisions by name: nothing to evict, one value, values that look the same, a model that decodes, two sessions, many."""
    alone = EvictionCandidate(_MIB, DataResidency.PERSISTENT_WEIGHT, SessionHints(0), last_use=3)
    decoding = SessionHints(0, phase=ExecutionPhase.LLM_DECODE, over_share=(DataResidency.STATEFUL_KV_CACHE,))
    model = [
        EvictionCandidate(4 * _MIB, _KINDS[n % 5 == 0], decoding, next_use=n + 1, last_use=20 - n, serial=n + 1)
        for n in range(20)
    ]
    idle = SessionHints(1, idle=True, phase=ExecutionPhase.TRAINING)
    states = [attrs.evolve(one, session=idle, residency=_KINDS[2], next_use=None) for one in model]
    return {
        "nothing": _decision(()),
        "one": _decision((alone,)),
        "equals": _decision((alone, alone, alone)),
        "decoding": _decision(tuple(model)),
        "two sessions": _decision((*model, *states)),
        "many": _decision(_many(500)),
    }


def _decision(candidates: tuple[EvictionCandidate, ...]) -> EvictionContext:
    held = sum(candidate.nbytes for candidate in candidates)
    return EvictionContext(candidates, held // 3 + 1, held + _MIB, held)


def _many(count: int) -> tuple[EvictionCandidate, ...]:
    """Candidates of all kinds, with hints drawn at random, the same ones each time."""
    draw = random.Random(0)  # noqa: S311 - no secret
    sessions = [SessionHints(n, idle=n == 2, phase=phase) for n, phase in enumerate(ExecutionPhase)]
    made = []
    for serial in range(count):
        outlives = draw.random() < 0.7
        made.append(
            EvictionCandidate(
                draw.choice((1, 4, 16)) * _MIB,
                draw.choice(_KINDS),
                draw.choice(sessions),
                outlives,
                draw.choice((None, draw.randrange(10_000))),
                draw.randrange(10_000),
                draw.random() < 0.5,
                draw.random() / 100,
                None if outlives else draw.choice((None, draw.random() / 100)),
                serial + 1 if outlives else 0,
            )
        )
    return tuple(made)


class MemoryPolicyConformance(Ending):
    """Subclass it and give the fixture `policy`."""

    @pytest.fixture
    def policy(self) -> MemoryPolicy:
        """The memory policy."""
        return missing(self, "policy", "your memory policy")  # type: ignore[return-value]

    @pytest.fixture
    def evictions(self) -> Mapping[str, EvictionContext]:
        """The decisions to try, by name. Override to add your own to `djinn.testing.sample_evictions()`."""
        return sample_evictions()

    def test_it_is_a_memory_policy(self, policy: MemoryPolicy) -> None:
        """It has every member."""
        require_protocol(policy, "memory_policies")

    def test_it_orders_all_candidates_and_nothing_else(
        self, policy: MemoryPolicy, evictions: Mapping[str, EvictionContext]
    ) -> None:
        """Each position once: what is not a candidate is in use, and an order that ends early may free too little."""
        for name, context in evictions.items():
            order = list(policy.order(context))
            assert sorted(order) == list(range(len(context.candidates))), (
                f"{name}: not each of the {len(context.candidates)} candidates once: {order}"
            )

    def test_it_decides_the_same_again(self, policy: MemoryPolicy, evictions: Mapping[str, EvictionContext]) -> None:
        """It is pure: the same hints give the same result, whatever it was asked in between."""
        first = {name: list(policy.order(context)) for name, context in evictions.items()}
        for name, context in reversed(list(evictions.items())):
            assert list(policy.order(deepcopy(context))) == first[name], f"{name}: two results"

    def test_it_says_what_is_recomputed(self, policy: MemoryPolicy, evictions: Mapping[str, EvictionContext]) -> None:
        """A bool for each candidate that can be recomputed, the same each time."""
        asked = [c for context in evictions.values() for c in context.candidates if c.recompute_seconds is not None]
        results = [policy.recompute(candidate) for candidate in asked]
        assert all(isinstance(result, bool) for result in results), "`recompute` must return True or False"
        assert [policy.recompute(candidate) for candidate in asked] == results, "two results"
