"""Memory policies of plugins: one is chosen by name, and decides until it fails."""

from __future__ import annotations

import pytest
import torch
from configured import configured
from servers import start_server

import djinn
from djinn.testing import executor_figures
from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.memory_policies import EvictionCandidate, EvictionContext, MemoryPolicy, SessionHints
from djinn_core.ir.profile import DataResidency
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.builtins.memory import NextUsePolicy
from djinn_server.disk_quota import DiskQuota
from djinn_server.memory.eviction import Decider
from djinn_server.memory.limited import LimitedRuntime

MIB = 1 << 20
WEIGHT, CACHE, STATE, ACTIVATION = (
    DataResidency.PERSISTENT_WEIGHT,
    DataResidency.STATEFUL_KV_CACHE,
    DataResidency.OPTIMIZER_STATE,
    DataResidency.EPHEMERAL_ACTIVATION,
)
BUSY, IDLE = SessionHints(0), SessionHints(1, idle=True)


class Policy(MemoryPolicy):
    """The newest goes first, and never anything else than it was told to answer."""

    name = "newest"

    def __init__(self, order=None, recompute=None):
        self.contexts = []
        self.answers = order, recompute

    def order(self, context):
        self.contexts.append(context)
        order, _ = self.answers
        if order is not None:
            return order(context)
        return sorted(range(len(context.candidates)), key=lambda i: -context.candidates[i].serial)

    def recompute(self, candidate):
        _, recompute = self.answers
        return recompute(candidate) if recompute is not None else False

    @hookimpl
    def djinn_register_memory_policies(self):
        return [self]

    djinn_api_version = "2.0"


def first(*candidates):
    """The order in which the built-in policy evicts, as positions."""
    return list(NextUsePolicy().order(EvictionContext(candidates, 1, 2, 3)))


def test_the_built_in_policy_evicts_what_is_used_last_first():
    a = EvictionCandidate(MIB, WEIGHT, BUSY, next_use=5)
    b = EvictionCandidate(MIB, WEIGHT, BUSY, next_use=50)
    never = EvictionCandidate(MIB, WEIGHT, BUSY, next_use=None)
    assert first(a, b, never) == [2, 1, 0]


def test_the_built_in_policy_evicts_idle_sessions_first_and_caches_in_use_last():
    kinds = (WEIGHT, CACHE)
    idle = [EvictionCandidate(MIB, kind, IDLE, next_use=1) for kind in kinds]
    busy = [EvictionCandidate(MIB, kind, BUSY) for kind in kinds]
    assert first(*busy, *idle) == [3, 2, 0, 1]


def test_the_built_in_policy_evicts_by_kind_what_no_use_is_foreseen_of():
    unforeseen = [EvictionCandidate(MIB, kind, BUSY) for kind in (WEIGHT, STATE, ACTIVATION)]
    assert first(*unforeseen) == [2, 1, 0]
    many_weights = SessionHints(0, over_share=(WEIGHT,))
    assert first(*[EvictionCandidate(MIB, one.residency, many_weights) for one in unforeseen])[0] == 0


def test_the_built_in_policy_recomputes_what_is_quicker_made_again():
    quick = EvictionCandidate(MIB, ACTIVATION, BUSY, restore_seconds=0.1, recompute_seconds=0.01)
    slow = EvictionCandidate(MIB, ACTIVATION, BUSY, restore_seconds=0.1, recompute_seconds=0.2)
    assert NextUsePolicy().recompute(quick)
    assert not NextUsePolicy().recompute(slow)


def raising(_):
    raise ZeroDivisionError("no such luck")


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (raising, "no such luck"),
        (lambda context: range(len(context.candidates) - 1), "not each of the 3 candidates once"),
        (lambda _: [0, 0, 1], "not each of the 3 candidates once"),
        (lambda _: [0, 1, 3], "not each of the 3 candidates once"),
        (lambda _: None, "TypeError"),
        (lambda _: ["0", "1", "2"], "not each"),
    ],
)
def test_a_policy_that_fails_is_named_and_the_built_in_one_decides(order, said, caplog):
    decider = Decider(Policy(order), "a-plugin 1.0")
    candidates = tuple(EvictionCandidate(MIB, WEIGHT, BUSY, next_use=n) for n in (3, 9, 1))
    for _ in range(3):
        assert list(decider.order(EvictionContext(candidates, 1, 2, 3))) == [1, 0, 2]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "policy='newest' plugin='a-plugin 1.0'" in warning
    assert said in warning


def test_a_policy_that_cannot_say_what_is_recomputed_is_named_as_well(caplog):
    decider = Decider(Policy(recompute=raising), "a-plugin 1.0")
    candidate = EvictionCandidate(MIB, ACTIVATION, BUSY, restore_seconds=0.1, recompute_seconds=0.01)
    assert decider.recompute(candidate)
    assert "plugin='a-plugin 1.0'" in caplog.text
    assert "`recompute` raised ZeroDivisionError('no such luck')" in caplog.text


@pytest.fixture
def inline():
    """Starts an executor in this process with a limit of 16 MiB and a policy of a plugin's."""

    def start(policy, name="newest"):
        djinn.shut_down()
        djinn.configure(
            executor="inline", plugins=[policy], memory_policy=name, memory_gib=16 / 1024, threads=1
        )  # fmt: skip
        return "remote_accelerator:0"

    yield start
    djinn.shut_down()
    djinn.configure()


def total(device):
    given = [torch.full((MIB // 4,), float(n)).to(device) for n in range(24)]
    return [sum(one.sum() for one in given).item() for _ in range(2)]


def test_a_plugins_policy_decides_on_an_executor(inline):
    policy = Policy()
    assert total(inline(policy)) == [MIB // 4 * sum(range(24))] * 2
    assert policy.contexts
    for context in policy.contexts:
        assert context.needed > 0
        assert context.resident <= 16 * MIB
        assert all(one.nbytes == MIB for one in context.candidates)
    late = policy.contexts[-1].candidates
    assert any(one.last_use > 0 for one in late)
    assert any(one.next_use is not None for one in late)


def test_a_plugins_policy_that_raises_costs_nothing_but_a_warning(inline, caplog):
    policy = Policy(raising)
    assert total(inline(policy)) == [MIB // 4 * sum(range(24))] * 2
    assert len(policy.contexts) > 1
    assert caplog.text.count("a memory policy failed") == 1
    assert "plugin 'newest'" in caplog.text


def test_an_unknown_policy_is_named(inline):
    inline(Policy(), "nothing")
    with pytest.raises(
        djinn.errors.StartupError, match=r"no memory policy 'nothing' here \(memory policies: newest, next_use\)"
    ):
        djinn.init()


def test_a_limit_without_a_policy_has_the_built_in_one():
    runtime = LimitedRuntime(CpuRuntime(), MIB, DiskQuota())
    assert runtime.ledger.decider.name == "next_use"


def test_a_server_with_a_policy_of_a_plugin(python, tmp_path, plain_environment):
    server = start_server(
        python.start, tmp_path, "--memory-gib", "0.03", "--memory-policy", "lru", env=plain_environment
    )
    try:
        djinn.shut_down()
        djinn.configure(connection_file=server.file)
        assert total("remote_accelerator:0") == [MIB // 4 * sum(range(24))] * 2
    finally:
        djinn.shut_down()
        djinn.configure()
        server.stop()


def scans(policy):
    """The sum of weights that do not fit, four times in the same order, as layers of a model are used; figures of the executor."""
    with configured(threads=1, memory_gib=48 / 1024, memory_policy=policy):
        djinn.init()
        weights = [torch.full((MIB,), float(n)).to("remote_accelerator:0") for n in range(16)]
        sums = []
        for _ in range(4):
            total = weights[0].sum()
            for weight in weights[1:]:
                total = total + weight.sum()
            sums.append(total.item())
        return sums, executor_figures()


def test_least_recently_used_beside_the_built_in_policy_on_an_executor():
    sums, lru = scans("lru")
    expected, built_in = scans("next_use")
    assert sums == expected == [MIB * sum(range(16))] * 4
    # 64 MiB in turns through less than 48: the least recently used weight is the next one, so each has to come back each time.
    assert lru["restored_bytes"] >= 3 * 16 * 4 * MIB
    assert 0 < built_in["restored_bytes"] < 0.8 * lru["restored_bytes"]
