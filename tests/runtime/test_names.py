"""Names under which readers of papers look for things: each does what the thing does that it stands for."""

from __future__ import annotations

import logging

import pytest
import torch

import djinn
from djinn.compat import MetadataRegistry, PatternRegistry, SemanticAnalyzer
from djinn.hooks import CostModel, Optimization
from djinn.planning import matcher, op
from djinn.testing import random_graph, topology
from djinn_core.ir.plan import OptimizationResult

DEVICE = "remote_accelerator:0"


@pytest.fixture
def captured_model(embedded):
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4), torch.nn.ReLU())
    before = [p.device for p in model.parameters()]
    with djinn.capture(model) as found:
        y = model(torch.zeros(3, dtype=torch.long, device=DEVICE))
        y.sum().backward()
    assert [p.device for p in model.parameters()] == before
    assert torch.equal(y.detach().cpu(), model(torch.zeros(3, dtype=torch.long)))
    return found


def test_capture_function_of_cpu_model(captured_model):
    modules = {node.module for node in captured_model.graph.nodes}
    assert {"0", "1"} <= modules
    node = captured_model.graph.nodes[1]
    assert captured_model.graph.get_node_by_id(1) is node
    assert captured_model.graph.get_node_by_id(-1) is captured_model.graph.get_node_by_id(10**6) is None


def test_semantic_metadata_of_nodes(captured_model):
    found = captured_model.semantic_metadata
    assert all(one.role and one.cost is not None for one in found)
    by_op = {one.op.partition("::")[2].partition(".")[0]: one for one in found}
    assert by_op["embedding"].memory_pattern == "random"
    assert by_op["relu"].memory_pattern == "streaming"
    assert any(one.is_gradient for one in found)
    assert not any(one.synchronises for one in found)
    with djinn.capture() as other:
        ones = torch.ones(3)
        ones.nonzero()
        ones.exp().sum().item()
    assert [one.op for one in other.semantic_metadata if one.synchronises] == ["aten::nonzero", "aten::sum"]


def test_schedule_has_stages_and_groups():
    schedule = djinn.compat.Scheduler(topology(2)).create_schedule(random_graph(3))
    assert schedule.total_stages == len(schedule.stages) > 0
    assert sorted(schedule.node_to_stage) == sorted(schedule.node_to_group)
    for node, stage in schedule.node_to_stage.items():
        group = schedule.groups[schedule.node_to_group[node]]
        assert node in group.nodes
        assert group in schedule.stages[stage]
    assert schedule.strategy is djinn.planning.SchedulingStrategy.SEQUENTIAL


def test_scheduler_can_be_added_and_cleared():
    asked = []

    class WatchingOptimization(CostModel, Optimization):
        name = "watching"

        def optimize(self, context):
            asked.append("optimize")
            return OptimizationResult(self.name, False, "watched")

        def estimate(self, graph, node, device):
            asked.append("estimate")

    graph, scheduler = random_graph(3), djinn.compat.Scheduler(topology(), cost_estimator=WatchingOptimization())
    scheduler.create_schedule(graph)
    assert set(asked) == {"estimate"}
    scheduler.add_optimization_strategy(WatchingOptimization())
    scheduler.create_schedule(graph)
    assert set(asked) == {"estimate", "optimize"}
    scheduler.clear_cache()
    asked.clear()
    scheduler.create_schedule(graph)
    assert asked
    assert scheduler.get_stats()["cost_aware"] == scheduler.get_stats()["misses"]


@pytest.mark.usefixtures("embedded")
def test_custom_patterns_match_graph():
    with djinn.capture() as captured_model:
        torch.ones(3).relu().exp()
    term = op("relu") >> op("exp")
    rectified = matcher("rectified", term, confidence=0.9, reason="an exponential of a rectified value")
    registry = PatternRegistry([])
    registry.register(rectified)
    with pytest.raises(djinn.errors.ConfigurationError, match="another name"):
        registry.register(rectified)
    profile = SemanticAnalyzer(registry).analyze_graph(captured_model.graph)
    assert [m.pattern for m in profile.patterns] == ["rectified"]
    metadata = MetadataRegistry(captured_model.graph, profile)
    assert metadata.get_metadata(profile.patterns[0].nodes[-1]).role == "rectified"
    assert metadata.get_metadata(99) is None
    assert len(PatternRegistry()) > 3


def test_runtime_state_lists_session(embedded):
    torch.ones(1, device=DEVICE).cpu()
    state = djinn.compat.get_runtime_state()
    assert state.initialized
    assert len(state.devices) == len(state.servers) == 1
    assert "attention" in " ".join(state.plugins)
    djinn.shut_down()
    assert djinn.compat.get_runtime_state().devices == ()


def test_debug_level_is_set_by_stage_name():
    djinn.compat.set_debug_level("scheduler")
    assert logging.getLogger("djinn.pipeline").level == logging.getLogger("djinn.stages").level == logging.DEBUG
    djinn.compat.set_debug_level("off")
