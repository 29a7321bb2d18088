"""A router of a stranger's, from the guide, runs real programs over two executors as the CPU does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import djinn
from djinn.planning import storage_of
from djinn.testing import PluginConformance, RouterConformance, executor_processes, open_session
from djinn_client.interception.recording.recorder import current
from tests.plugins import by_memory
from tests.shared.figures import figures

BOTH, ONE, OTHER = "remote_accelerator:0", "remote_accelerator:1", "remote_accelerator:2"
FILE = Path(by_memory.__file__)


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return by_memory


class TestRouter(RouterConformance):
    @pytest.fixture
    def router(self):
        return by_memory.ByMemory()


@pytest.fixture(params=[2, 1], ids=["from the beginning", "when one joins"])
def value_on_both(request):
    """Yield a value on two executors, which start together or one after the other."""
    djinn.shut_down()
    djinn.configure(plugins=[by_memory], router="by_memory", executors=request.param)
    djinn.init()
    began = open_session()
    kept = torch.arange(6.0).reshape(2, 3).to(BOTH)
    djinn.scale(executors=2)
    assert open_session() is began, "the session stays the same object"
    assert began.router.name == "by_memory"
    assert len(executor_processes()) == 2
    yield kept
    djinn.shut_down()
    djinn.configure()


def test_router_file_imports_djinn_only():
    lines = FILE.read_text().splitlines()
    assert len(lines) < 150
    imported = [line.split()[1] for line in lines if line.startswith(("import ", "from "))]
    assert {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names) - {"__future__"} == {"djinn"}
    assert {name for name in imported if name.startswith("djinn")} == {"djinn.hooks", "djinn.planning"}


def train(first, second):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)]
    x = torch.randn(5, 8)
    layers[0].to(first), layers[1].to(second)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1, foreach=False)
    losses = []
    for _ in range(3):
        loss = layers[1](layers[0](x.to(first)).relu().to(second)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *[p.detach().cpu() for layer in layers for p in layer.parameters()]]


def test_model_over_two_executors_trains_as_on_cpu(value_on_both):
    for here, there in zip(train("cpu", "cpu"), train(ONE, OTHER), strict=True):
        torch.testing.assert_close(there, here)
    for number in (1, 2):
        assert figures(open_session().router, number)["submissions"] > 0


def test_values_are_placed_and_freed(value_on_both):
    router = open_session().router
    before = [figures(executor)["values"] for executor in open_session().executors.current]
    one, other = torch.ones(3, 4).to(BOTH), torch.full((4, 2), 2.0).to(BOTH)
    assert {router.home(storage_of(value.remote.handle)) for value in (one, other)} == {0, 1}
    product = one @ other
    view = other.t()
    view.add_(1)
    assert (one @ other).tolist() == [[12.0, 12.0]] * 3
    assert product.tolist() == [[8.0, 8.0]] * 3
    assert value_on_both.sum().item() == 15
    djinn.synchronize()
    held = [figures(executor)["values"] for executor in open_session().executors.current]
    assert [now - then for now, then in zip(held, before, strict=True)] == [2, 2]
    del one, other, product, view
    djinn.synchronize()
    assert [figures(executor)["values"] for executor in open_session().executors.current] == before
    assert router.topology() is None


def test_value_is_copied_again_while_its_first_reader_waits(value_on_both):
    one, other = torch.ones(3, 4).to(BOTH), torch.full((4, 2), 2.0).to(BOTH)
    busy = torch.eye(1500).to((ONE, OTHER)[open_session().router.home(storage_of(one.remote.handle))])
    for _ in range(6):
        busy = busy @ busy
    current().flush()  # while it runs, both copies of `other` arrive, and both submissions that free them
    product = one @ other
    other.add_(1)
    assert (one @ other).tolist() == [[12.0, 12.0]] * 3
    assert product.tolist() == [[8.0, 8.0]] * 3
    assert busy.trace().item() == 1500


def test_failure_on_other_executor_is_raised_at_fetch(value_on_both):
    table = torch.zeros(4, 2).to(OTHER)
    found = table[torch.tensor([9]).to(OTHER)]
    with pytest.raises(IndexError):
        found.tolist()
    assert table.sum().item() == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"router": "none_such"}, "none_such"), ({"disable": ["pool"]}, "pip install ./plugins/pool")],
)
def test_missing_router_is_named(settings, named):
    djinn.shut_down()
    djinn.configure(executors=2, **settings)
    try:
        with pytest.raises(djinn.errors.ConfigurationError, match=named):
            djinn.init()
    finally:
        djinn.configure()


def test_scaling_without_pool_package_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "djinn_pool", None)  # importing it raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, "djinn_pool.scaling", raising=False)
    monkeypatch.delattr(djinn, "scale", raising=False)
    with pytest.raises(djinn.errors.PluginError, match=r"(?s)djinn-pool.*\./plugins/pool"):
        djinn.scale(2)
