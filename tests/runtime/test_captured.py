"""`capture`, `plan`, `explain`, `execute` and `Scheduler`, as a user meets them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

import djinn
from djinn.hooks import Observer
from djinn_core.ir.result import PipelineResult
from djinn_core.planning.stages.annotate import annotate
from djinn_core.planning.stages.estimate import estimate

DEVICE = "remote_accelerator:0"


def test_capture_needs_no_server_and_no_device_argument(python, plain_environment) -> None:
    script = """
        import torch, djinn
        with djinn.capture() as captured:
            assert djinn.compat.is_capturing()
            x = torch.randn(2, 4) + torch.tensor([1.0, 2.0, 3.0, 4.0])
            y = torch.nn.Linear(4, 3)(x).relu()
        assert not djinn.compat.is_capturing() and not djinn.compat.is_initialized()
        assert captured.graph.by_op["relu"] and djinn.get_graph().topology_hash == captured.graph.topology_hash
        assert captured.profile.phases and len(captured.semantic_metadata) == len(captured.graph.nodes)
        assert not djinn.compat.is_initialized()
        assert y.shape == (2, 3) and (y.cpu() >= 0).all() and djinn.compat.is_initialized()
    """
    lines = "\n".join(line.removeprefix(" " * 8) for line in script.splitlines())
    done = python.run("-c", lines, env=plain_environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("embedded")
def test_normal_with_size_is_factory() -> None:
    mean = torch.zeros(3)
    with djinn.capture():
        made = torch.normal(0.0, 1.0, (2,)), torch.normal(mean=0.0, std=1.0, size=(2,))
        here = torch.normal(mean, 1.0), torch.normal(0.0, 1.0, (2,), device="cpu")
    assert [tensor.device.type for tensor in (*made, *here)] == ["remote_accelerator"] * 2 + ["cpu"] * 2


@pytest.mark.usefixtures("embedded")
def test_eye_is_recorded_with_size() -> None:
    with djinn.capture() as captured:
        made = torch.eye(3, device=DEVICE), torch.eye(2, 3, dtype=torch.int64, device=DEVICE)
    graph = captured.graph
    assert [graph.meta(node.outputs[0]).shape for node in graph.nodes] == [(3, 3), (2, 3)]
    for matrix, expected in zip(made, (torch.eye(3), torch.eye(2, 3, dtype=torch.int64)), strict=True):
        assert torch.equal(matrix.cpu(), expected)
    with pytest.raises(RuntimeError, match="must be greater or equal to 0"):
        torch.eye(-1, device=DEVICE)


def test_schedule_runs_on_other_inputs() -> None:
    weight = torch.randn(4, 4)
    remote = weight.to(DEVICE)
    other = torch.ones(4, 4, device=DEVICE)
    with djinn.capture() as captured:
        out = (remote @ remote).relu()
    schedule = djinn.plan(captured).schedule
    assert schedule is not None
    assert torch.equal(djinn.planning.execute(schedule)[-1].cpu(), (weight @ weight).relu())
    assert torch.equal(djinn.planning.execute(schedule, inputs=[other])[-1].cpu(), torch.full((4, 4), 4.0))
    by_hand = djinn.compat.Scheduler().create_schedule(captured.graph)
    assert torch.equal(
        djinn.planning.execute(by_hand, {captured.graph.inputs[0]: other})[-1].cpu(), torch.full((4, 4), 4.0)
    )
    assert torch.equal(out.cpu(), (weight @ weight).relu())


@pytest.mark.usefixtures("embedded")
def test_mismatched_inputs_are_refused() -> None:
    remote = torch.ones(4, device=DEVICE)
    with djinn.capture() as captured:
        kept = remote + 1
    schedule = djinn.plan(captured).schedule
    assert schedule is not None
    with pytest.raises(djinn.DjinnError, match=r"shape \(3,\)"):
        djinn.planning.execute(schedule, inputs=[torch.ones(3, device=DEVICE)])
    with pytest.raises(djinn.DjinnError, match="2 inputs were given for a graph with 1"):
        djinn.planning.execute(schedule, inputs=[remote, remote])
    with pytest.raises(djinn.DjinnError, match=r"the graph has no inputs \[7\]; its inputs are \["):
        djinn.planning.execute(schedule, inputs={7: remote})
    assert kept.tolist() == [2.0] * 4


def test_plan_stops_at_requested_stage() -> None:
    with djinn.capture() as captured:
        torch.ones(3) * 2
    with pytest.raises(
        djinn.errors.ConfigurationError, match="no stage 'estimates'; the stages are annotate, estimate"
    ):
        djinn.plan(captured, until="estimates")
    result = djinn.plan(captured, until="estimate")
    assert result.costs is not None
    assert result.plan is None
    assert "annotate" in djinn.explain(result)
    assert "optimize" not in djinn.explain(result)
    assert "schedule" in djinn.explain(captured)


@pytest.mark.usefixtures("embedded")
def test_repeated_capture_is_not_analysed(monkeypatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).to(DEVICE)
    analysed = []
    monkeypatch.setattr("djinn_core.planning.pipeline.annotate", record_calls(analysed, annotate))
    monkeypatch.setattr("djinn_core.planning.pipeline.estimate", record_calls(analysed, estimate))

    def capture_on(rows: int, layers: torch.nn.Module = model) -> PipelineResult:
        with djinn.capture() as captured:
            layers(torch.ones(rows, 8, device=DEVICE)).sum()
        assert captured.profile.phases
        assert "Linear" in djinn.explain(captured)
        return djinn.plan(captured)

    first, second = capture_on(3), capture_on(3)
    assert analysed == ["annotate", "estimate"]
    assert second.schedule is not None
    assert second.graph is not first.graph
    assert set(second.schedule.replace) <= set(second.graph.outputs) | {
        v for n in second.graph.nodes for v in n.outputs
    }
    capture_on(4)
    assert len(analysed) == 4  # of another size, all figures are other ones
    capture_on(3, torch.nn.Sequential(model))
    assert len(analysed) == 6  # modules of another name
    scheduler = djinn.compat.Scheduler()
    made = [scheduler.create_schedule(result.graph) for result in (first, second)]
    assert scheduler.get_stats() == {"hits": 1, "misses": 1, "cost_aware": 1, "basic": 0, "minimal": 0}
    assert [schedule.program for schedule in made] == [first.graph.program, second.graph.program]


def record_calls(seen: list[str], stage: Callable[..., object]) -> Callable[..., object]:
    """Return the stage, wrapped so that each call appends its name to `seen`."""

    def call_stage(*args: object, **kwargs: object) -> object:
        seen.append(stage.__name__)
        return stage(*args, **kwargs)

    return call_stage


@pytest.mark.usefixtures("embedded")
def test_analysed_model_is_freed() -> None:
    model = torch.nn.Linear(8, 8).to(DEVICE)
    freed = weakref.ref(model)
    with djinn.capture() as captured:
        model(torch.ones(3, 8, device=DEVICE))
    djinn.plan(captured)
    del model, captured
    with djinn.capture():  # the last capture of a thread is kept
        pass
    gc.collect()
    assert freed() is None


def test_get_graph_without_capture_raises(python, plain_environment) -> None:
    done = python.run("-c", "import djinn; djinn.get_graph()", env=plain_environment)
    assert "this thread has captured no program" in done.stderr


class ObserverPlugin:
    """A plugin with an observer that records events, and one that raises."""

    djinn_api_version = "2.0"

    def __init__(self) -> None:
        self.seen: list[str] = []

    @djinn.hooks.hookimpl
    def djinn_register_observers(self) -> list[object]:
        listener = self

        class Remembers(Observer):
            name = "remembers"

            def observe(self, event: object) -> None:
                listener.seen.append(event.name)

        class Raises(Observer):
            name = "raises"

            def observe(self, event: object) -> None:
                raise ValueError("on purpose")

        return [Raises(), Remembers()]


def test_raising_observer_does_not_stop_others() -> None:
    plugin = ObserverPlugin()
    djinn.shut_down()
    djinn.configure(plugins=[plugin], threads=1, memory_limits={"": 1 << 40})
    try:
        assert torch.ones(3, device=DEVICE).sum().item() == 3
        assert plugin.seen == ["connected", "planned", "submitted", "completed", "waited"]
    finally:
        djinn.shut_down()
        djinn.configure()
    assert plugin.seen[-1] == "disconnected"
