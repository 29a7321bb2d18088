"""The suite for memory policies, and candidates to try them on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_server.hookspecs.memory_policies import EvictionCandidate, MemoryPolicy

_MIB = 1 << 20


def sample_evictions(count: int = 500) -> tuple[EvictionCandidate, ...]:
    """Return candidates with random but reproducible uses."""
    draw = random.Random(0)  # noqa: S311 - no secret
    return tuple([
        EvictionCandidate(
            draw.choice((1, 4, 16)) * _MIB,
            draw.randrange(10_000),
            draw.choice((None, draw.randrange(10_000))),
        )
        for _ in range(count)
    ])  # fmt: skip


class MemoryPolicyConformance(Ending):
    """Subclass it and give the fixture `policy`."""

    @pytest.fixture
    def policy(self) -> MemoryPolicy:
        """The memory policy."""
        return missing(self, "policy", "your memory policy")  # type: ignore[return-value]

    @pytest.fixture
    def evictions(self) -> Sequence[EvictionCandidate]:
        """The candidates to try. Override to add your own to `djinn.testing.sample_evictions()`."""
        return sample_evictions()

    def test_it_is_a_memory_policy(self, policy: MemoryPolicy) -> None:
        """The policy has every member."""
        require_protocol(policy, "memory_policies")

    def test_its_key_is_a_number(self, policy: MemoryPolicy, evictions: Sequence[EvictionCandidate]) -> None:
        """A number for each candidate that can be ordered."""
        for candidate in evictions:
            key = policy.key(candidate)
            assert isinstance(key, int | float), f"{key!r} is no number"
            assert not math.isnan(key), f"{candidate}: NaN"

    def test_it_decides_the_same_again(self, policy: MemoryPolicy, evictions: Sequence[EvictionCandidate]) -> None:
        """`key` is pure: equal candidates have equal keys, whatever was asked in between."""
        first = [policy.key(candidate) for candidate in evictions]
        again = [policy.key(candidate) for candidate in reversed(evictions)]
        assert first == again[::-1], "two results"
