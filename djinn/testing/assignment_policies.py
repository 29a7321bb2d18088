"""Conformance suite for assignment policies, with sample sessions."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy

import pytest

from djinn.testing.suite import Ending, missing, outcome, require_protocol, start
from djinn_server.hookspecs.assignment_policies import (
    AssignmentPolicy,
    AssignmentRefusal,
    AssignmentRequest,
    ExecutorLoad,
    TenantLoad,
)

_GIB = 1 << 30


def sample_assignments() -> dict[str, AssignmentRequest]:
    """Return sample requests by name, such as one executor, equal loads, other tenants and many executors."""
    idle = [ExecutorLoad(n, f"cpu:{n}", memory=8 * _GIB) for n in range(2)]
    busy = ExecutorLoad(0, "cpu:0", 0.9, 1, 3, 4, 8 * _GIB, 5 * _GIB, 3 * _GIB, ("llama",))
    shared = ExecutorLoad(1, "cpu:1", others=(TenantLoad("bob", 0.8, 3), TenantLoad("carol", 0.0, 1)))
    return {
        "one executor": AssignmentRequest("alice", (idle[0],)),
        "the second executor, by its number": AssignmentRequest("alice", (idle[1],), device="1"),
        "equal executors": AssignmentRequest("alice", (idle[0], idle[1])),
        "a busy executor": AssignmentRequest("alice", (busy, idle[1]), client="alice@laptop process 7"),
        "other tenants": AssignmentRequest("alice", (idle[0], shared)),
        "a model that is there": AssignmentRequest("alice", (busy, idle[1]), hint="llama"),
        "many executors": AssignmentRequest("bob", _many(16), device="cuda"),
    }


def _many(count: int) -> tuple[ExecutorLoad, ...]:
    """Return `count` executors with random but reproducible loads. Their numbers have gaps."""
    draw = random.Random(0)  # noqa: S311 - no secret
    return tuple(
        ExecutorLoad(
            2 * n,
            f"cuda:{2 * n}",
            draw.random(),
            draw.randrange(3),
            draw.randrange(9),
            draw.randrange(9),
            80 * _GIB,
            draw.choice((None, draw.randrange(80 * _GIB))),
            draw.randrange(40 * _GIB),
            others=(TenantLoad("alice", draw.random(), draw.randrange(1, 4)),) if draw.random() < 0.5 else (),
        )
        for n in range(count)
    )


class AssignmentPolicyConformance(Ending):
    """Tests that every assignment policy must pass. Subclass this class and define the fixture `policy`."""

    @pytest.fixture
    def policy(self) -> AssignmentPolicy:
        """Return the assignment policy under test."""
        return missing(self, "policy", "your assignment policy")  # type: ignore[return-value]

    @pytest.fixture
    def assignments(self) -> Mapping[str, AssignmentRequest]:
        """Return the sample requests by name. Override this fixture to add your own."""
        return sample_assignments()

    def test_policy_has_every_member(self, policy: AssignmentPolicy) -> None:
        """The policy has all attributes and methods of `AssignmentPolicy`."""
        require_protocol(policy, "assignment_policies")

    def test_assign_returns_an_offered_executor_or_a_refusal(
        self, policy: AssignmentPolicy, assignments: Mapping[str, AssignmentRequest]
    ) -> None:
        """`assign` returns the number of an executor in the request, or a refusal with a reason.

        The number of an executor is not its position in the request.
        """
        for name, request in assignments.items():
            result = policy.assign(request)
            if isinstance(result, AssignmentRefusal):
                assert result.reason, f"{name}: the refusal has no reason"
                continue
            numbers = [load.number for load in request.executors]
            assert result in numbers, f"{name}: {result!r} is not one of the executors {numbers}"

    def test_assign_is_deterministic(
        self, policy: AssignmentPolicy, assignments: Mapping[str, AssignmentRequest]
    ) -> None:
        """`assign` returns equal results for equal requests, even if other sessions were assigned in between."""
        first = {name: policy.assign(request) for name, request in assignments.items()}
        for name, request in reversed(list(assignments.items())):
            assert policy.assign(deepcopy(request)) == first[name], f"{name}: two calls returned different results"

    def test_threads_may_call_it_concurrently(
        self, policy: AssignmentPolicy, assignments: Mapping[str, AssignmentRequest]
    ) -> None:
        """Several threads can call `assign` at the same time, because each client has its own thread."""
        for call in [start(policy.assign, request) for request in assignments.values() for _ in range(5)]:
            outcome(call, "`assign` must not block, because a client waits for it")
