"""Programs run as recorded unless a plan can act. Plans are found again for programs of the same structure, and only for those."""

from __future__ import annotations

import threading
from typing import cast

import pytest
import torch

import djinn
from djinn.hooks import Optimization, hookimpl
from djinn.planning import OptimizationResult, WorkloadType
from djinn_client.runtime import client
from djinn_core.registry.loading import PluginLoader
from djinn_core.registry.registry import Registry

pytestmark = pytest.mark.usefixtures("embedded")
DEVICE = "remote_accelerator:0"


def add_twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add to `a` twice, with a write to `b` in between. The sums are equal unless `a` and `b` share memory."""
    doubled = (a + 1) * 2
    b.add_(5)
    return doubled + (a + 1) * 3


def upload_and_flush(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the device, with nothing left to send."""
    remote = tensor.to(DEVICE)
    remote.cpu()
    return remote


@pytest.mark.usefixtures("plans_all")
def test_plan_key_includes_shared_memory_of_inputs() -> None:
    apart = upload_and_flush(torch.zeros(3)), upload_and_flush(torch.zeros(3))
    base = upload_and_flush(torch.zeros(3))
    together = base, base.view(3)
    together[1].cpu()
    assert add_twice(*apart).tolist() == [5.0] * 3
    assert add_twice(*together).tolist() == [20.0] * 3


@pytest.mark.usefixtures("plans_all")
@pytest.mark.parametrize(("first", "second"), [(2, 2.0), (0.0, -0.0), (2.0, 3.0)])
def test_plan_with_merged_scalars_is_not_reused(first: float, second: float) -> None:
    x = upload_and_flush(torch.tensor([1, -1]))
    assert_results_equal(torch.tensor([1, -1]), x, first, first)
    assert_results_equal(torch.tensor([1, -1]), x, first, second)


def assert_results_equal(local: torch.Tensor, remote: torch.Tensor, first: float, second: float) -> None:
    """Compare two products that can be merged only if the scalars are equal."""

    def products(t: torch.Tensor) -> torch.Tensor:
        left, right = t * first, t * second
        return torch.stack([left.double(), right.double()])

    got, want = products(remote).cpu(), products(local)
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())


def run(length: int = 3) -> float:
    """Return the sum that a program of `length` instructions computes."""
    y = upload_and_flush(torch.ones(4, 4)).cosh()
    for _ in range(length - 2):
        y = y.relu()
    return y.sum().item()


@pytest.mark.parametrize("length", [3, 100])
def test_program_runs_as_recorded_if_no_plan_can_act(length: int) -> None:
    djinn.reset_stats()
    assert len({run(length) for _ in range(12)}) == 1
    assert djinn.stats()["plans_made"] == djinn.stats()["plans_reused"] == 0
    djinn.reset_stats()
    run(length)
    assert djinn.stats()["templates_sent"] == 0


@pytest.mark.parametrize(
    "settings", [{"memory_limits": {"": 1 << 30}}, {"placement_policy": "single"}], ids=["limit", "policy"]
)
def test_settings_that_need_plans_plan_at_once(settings: dict[str, object]) -> None:
    djinn.configure(**settings)
    try:
        run()
        djinn.reset_stats()
        upload_and_flush(torch.randn(4, 4)).sinh().cosh().sum().item()
        assert djinn.stats()["plans_made"] == 1
        upload_and_flush(torch.randn(4, 4)).sinh().cosh().sum().item()
        assert (djinn.stats()["plans_made"], djinn.stats()["plans_reused"]) == (1, 1)
    finally:
        djinn.configure(memory_limits=(), placement_policy="")


def test_known_program_is_planned_again_while_plans_are_recorded() -> None:
    run()
    run()
    with client.record_plans() as plans:
        run()
        run()
    assert [len(plan.graph.nodes) for plan in plans if plan.graph.nodes[0].op == "aten::cosh"] == [3]


class WantingOptimization(Optimization):
    """An optimization that wants programs with an op, and records its calls."""

    name = "wanting"
    tolerates_growth = True

    def __init__(self, op: str) -> None:
        self.op = op
        self.asked: list[int] = []

    def wants(self, ops: frozenset[str]) -> bool:
        if self.op == "raises":
            raise ValueError("oops")
        return self.op in ops

    def optimize(self, context):
        self.asked.append(len(context.graph.nodes))
        return OptimizationResult(self.name, applied=False, reason="it only counts")


class Plugin:
    """A plugin that registers an optimization."""

    name = "wanting_plugin"
    djinn_api_version = "2.0"

    def __init__(self, optimization: Optimization) -> None:
        self.optimization = optimization

    @hookimpl
    def djinn_register_optimizations(self):
        return [self.optimization]


def test_program_is_planned_only_if_an_optimization_wants_its_ops() -> None:
    optimization = WantingOptimization("aten::cosh")
    djinn.configure(plugins=[Plugin(optimization)], disable=("local",))
    try:
        x = upload_and_flush(torch.ones(4))
        djinn.reset_stats()
        x.sinh().sum().item()
        assert optimization.asked == []
        x.cosh().sum().item()
        assert optimization.asked == [2]
        assert djinn.stats()["plans_made"] == 1
    finally:
        djinn.configure(plugins=None, disable=())


def test_optimization_that_fails_to_answer_wants_nothing(caplog: pytest.LogCaptureFixture) -> None:
    djinn.configure(plugins=[Plugin(WantingOptimization("raises"))], disable=("local",))
    djinn.reset_stats()
    try:
        assert upload_and_flush(torch.zeros(4)).cosh().sum().item() == 4
        assert djinn.stats()["plans_made"] == 0
        assert any("'wanting'" in str(vars(record)) for record in caplog.records)
    finally:
        djinn.configure(plugins=None, disable=())


def test_optimizations_are_asked_only_about_repeated_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    optimization = WantingOptimization("aten::cosh")
    djinn.shut_down()
    djinn.init()
    assert client.context.registry is not None
    monkeypatch.setitem(vars(client.context.registry), "optimizations", (optimization,))
    x = upload_and_flush(torch.ones(4))
    x.cosh().sum().item()
    assert optimization.asked == []
    x.cosh().sum().item()  # an optimization wants it, and the plugins that plan are loaded before the next program
    x.cosh().sum().item()
    assert optimization.asked == [2]
    djinn.shut_down()


class LoaderUsingDevice:
    """A fake plugin loader. Its optimization uses the device in another thread during its import."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load(self, kind: str) -> tuple[Optimization, ...]:
        self.loaded.append(kind)
        if kind != "optimizations":
            return ()
        thread = threading.Thread(target=lambda: upload_and_flush(torch.ones(4)).sum().item(), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "the thread waits for the lock of the sink"
        return (WantingOptimization("aten::cosh"),)

    def report_failures(self) -> None:
        pass


def test_optimizations_are_loaded_without_the_lock_of_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    djinn.shut_down()
    djinn.init()
    loader = LoaderUsingDevice()
    monkeypatch.setattr(client.context, "registry", Registry(cast("PluginLoader", loader)))
    x = upload_and_flush(torch.ones(4))
    for _ in range(3):
        x.sinh().sum().item()
    assert loader.loaded == ["optimizations"]
    for _ in range(3):
        x.cosh().sum().item()
    assert sorted(loader.loaded) == ["cost_models", "optimizations", "patterns", "placement_policies", "schedulers"]
    djinn.shut_down()


def test_profile_without_plan_is_made_on_request() -> None:
    x = upload_and_flush(torch.randn(4, 4))
    djinn.reset_stats()
    x.cosh().sinh().sum().item()
    profile = djinn.planning.last_profile()
    assert profile is not None
    assert len(profile.phases) == 3
    assert djinn.stats()["plans_made"] == 0
    assert djinn.planning.last_profile() is profile


def test_update_profile_knows_earlier_gradients() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(DEVICE)
    for _ in range(3):
        loss = model(torch.randn(5, 8).to(DEVICE)).square().mean()
        loss.backward()
        loss.item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
        djinn.synchronize()
    profile = djinn.planning.last_profile()
    assert profile is not None
    assert profile.workload is WorkloadType.TRAINING


@pytest.mark.usefixtures("plans_all")
def test_programs_with_other_offsets_share_plan() -> None:
    local = torch.arange(400.0)
    x = upload_and_flush(local)
    djinn.reset_stats()
    for first, second in [(3, 5), (3, 5), (5, 5), (0, 399), (399, 0), (1, 1), (0, 0)]:
        doubled = (x[first] + 1) * (x[second] + 1)
        assert doubled.cpu() == (local[first] + 1) * (local[second] + 1), (first, second)
    assert djinn.stats()["plans_made"] <= 2  # one of which takes both places as one
