"""The assignment policies `affinity` and `fair_share` choose executors for sessions by load, data and shares."""

from __future__ import annotations

import attrs
import pytest

import djinn_strategies.sessions
from djinn.hooks import AssignmentRefusal, AssignmentRequest, ExecutorLoad, TenantLoad
from djinn.testing import AssignmentPolicyConformance, PluginConformance
from djinn_strategies.sessions import Affinity, AssignmentSettings, FairShareAssignment


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_strategies.sessions


class TestAffinity(AssignmentPolicyConformance):
    @pytest.fixture
    def policy(self):
        return Affinity()


class TestFairShare(AssignmentPolicyConformance):
    @pytest.fixture
    def policy(self):
        return FairShareAssignment({"alice": 2.0}, {"0": frozenset({"carol"})})


def loads(*some, **same):
    return tuple(attrs.evolve(load, number=n, device=f"cpu:{n}", **same) for n, load in enumerate(some))


@pytest.mark.parametrize(
    ("some", "hint", "expected"),
    [
        ([ExecutorLoad(held=1), ExecutorLoad(held=2, sessions=5)], "", 1),
        ([ExecutorLoad(held=1), ExecutorLoad(held=2, busy=0.8)], "", 0),  # beyond the margin
        ([ExecutorLoad(), ExecutorLoad(hints=("llama",), busy=0.4)], "llama", 1),
        ([ExecutorLoad(hints=("llama",), busy=0.8), ExecutorLoad()], "llama", 1),
        (
            [ExecutorLoad(held=9, recent=1), ExecutorLoad(hints=("llama",))],
            "bert",
            1,
        ),  # it is nowhere: the least loaded
    ],
)
def test_affinity_prefers_executor_with_tenant_data(some, hint, expected):
    assert Affinity(0.5).assign(AssignmentRequest("alice", loads(*some), hint=hint)) == expected


def test_fair_share_limits_executors_per_tenant():
    policy = FairShareAssignment.of(AssignmentSettings(shares=("alice=3",)))
    bob = {"others": (TenantLoad("bob", 0.0, 1),)}
    four = [ExecutorLoad(busy=0.9, sessions=1), *[ExecutorLoad() for _ in range(3)]]
    assert policy.assign(AssignmentRequest("alice", loads(*four))) == 1  # she is alone
    assert policy.assign(AssignmentRequest("alice", loads(*four, **bob))) == 1  # three of four are hers
    alice = {"others": (TenantLoad("alice", 0.0, 1),)}
    assert policy.assign(AssignmentRequest("bob", loads(*four, **alice))) == 0  # one of four is his, and he has it
    assert policy.assign(AssignmentRequest("bob", loads(*four))) == 1
    ended = {"others": (TenantLoad("alice"),)}
    assert policy.assign(AssignmentRequest("bob", loads(*four, **ended))) == 1


def test_fair_share_keeps_reserved_executors_for_their_tenants():
    policy = FairShareAssignment.of(AssignmentSettings(reservations=("0=alice", "cpu:1=alice", "cpu:1=bob")))
    three = loads(ExecutorLoad(busy=0.5), ExecutorLoad(busy=0.2), ExecutorLoad(busy=0.9))
    assert [policy.assign(AssignmentRequest(who, three)) for who in ("alice", "bob", "carol")] == [1, 1, 2]
    refused = policy.assign(AssignmentRequest("carol", three[:2]))
    assert isinstance(refused, AssignmentRefusal)
    assert "cpu:0, cpu:1 is reserved" in refused.reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"shares": ("alice",)},
        {"shares": ("alice=0",)},
        {"shares": (" =2",)},
        {"reservations": ("0=",)},
        {"reservations": ("0= ",)},
        {"margin": -1.0},
    ],
)
def test_invalid_policy_settings_raise(wrong):
    with pytest.raises(ValueError):
        AssignmentSettings(**wrong)
