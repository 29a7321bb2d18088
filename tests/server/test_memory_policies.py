"""Memory policies of plugins: one is chosen by name, and decides until it fails."""

from __future__ import annotations

import pytest
import torch
from configured import configured
from servers import start_server

import djinn
from djinn.testing import executor_figures
from djinn_core.hookspecs import hookimpl
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.builtins.memory import NextUsePolicy
from djinn_server.disk_quota import DiskQuota
from djinn_server.hookspecs.memory_policies import EvictionCandidate, MemoryPolicy
from djinn_server.memory.limited import LimitedRuntime
from djinn_server.memory.policy import CheckedPolicy

MIB = 1 << 20


class Policy(MemoryPolicy):
    """The most recently used goes first, unless it was told another answer."""

    name = "newest"

    def __init__(self, answer=None):
        self.candidates = []
        self.answer = answer

    def key(self, candidate):
        self.candidates.append(candidate)
        return -candidate.last_use if self.answer is None else self.answer(candidate)

    @hookimpl
    def djinn_register_memory_policies(self):
        return [self]

    djinn_api_version = "2.0"


def test_next_use_evicts_first_what_is_used_last():
    near, far = EvictionCandidate(MIB, next_use=5), EvictionCandidate(MIB, next_use=50)
    unforeseen = EvictionCandidate(MIB, last_use=20)
    assert sorted((near, far, unforeseen), key=NextUsePolicy().key, reverse=True) == [far, unforeseen, near]


def raising(_):
    raise ZeroDivisionError("no such luck")


@pytest.mark.parametrize(
    ("answer", "said"),
    [(raising, "no such luck"), (lambda _: None, "TypeError"), (lambda _: float("nan"), "NaN")],
)
def test_a_policy_that_fails_is_named_and_next_use_decides(answer, said, caplog):
    policy = CheckedPolicy(Policy(answer), "a-plugin 1.0")
    assert [policy.key(EvictionCandidate(MIB, next_use=n)) for n in (3, 9, 1)] == [3, 9, 1]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "policy='newest' plugin='a-plugin 1.0'" in warning
    assert said in warning


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
    assert {one.nbytes for one in policy.candidates} == {MIB}
    assert any(one.last_use > 0 for one in policy.candidates)
    assert any(one.next_use is not None for one in policy.candidates)


def test_a_plugins_policy_that_raises_costs_nothing_but_a_warning(inline, caplog):
    policy = Policy(raising)
    assert total(inline(policy)) == [MIB // 4 * sum(range(24))] * 2
    assert len(policy.candidates) > 1
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
    assert runtime.ledger.policy.name == "next_use"


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
