"""Conformance suite for cost models."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from djinn.testing.contexts import topology
from djinn.testing.samples import perceptron
from djinn.testing.suite import OnGraphs, missing, require_protocol
from djinn_core.hookspecs.cost_models import CostModel
from djinn_core.ir.costs import CostEstimate, DeviceCapabilities
from djinn_core.ir.graph import Graph, Node
from djinn_core.planning.stages.verify import check_estimate


class CostModelConformance(OnGraphs):
    """Tests that every cost model must pass. Subclass this class and define the fixture `cost_model`."""

    @pytest.fixture
    def cost_model(self) -> CostModel:
        """Return the cost model under test."""
        return missing(self, "cost_model", "your cost model")  # type: ignore[return-value]

    def test_cost_model_has_every_member(self, cost_model: CostModel) -> None:
        """The cost model has all attributes and methods of `CostModel`, and names ops as `Graph.by_op` does."""
        require_protocol(cost_model, "cost_models")
        odd = [operation for operation in cost_model.operations if "::" in operation or "." in operation]
        assert not odd, f"`operations` are names without namespace and overload, such as mm: {odd}"

    def test_estimates_are_finite_and_deterministic(self, cost_model: CostModel, graphs: Mapping[str, Graph]) -> None:
        """An estimate is None, or finite and not negative. Repeated calls return equal estimates."""
        for device in (topology().devices[0], DeviceCapabilities("unknown/cpu:0", "cpu")):
            for graph in graphs.values():
                for node in filter(lambda node: _estimates(cost_model, node), graph.nodes):
                    estimate = cost_model.estimate(graph, node, device)
                    assert estimate == cost_model.estimate(graph, node, device), f"{node.op}: two different estimates"
                    if estimate is not None:
                        assert isinstance(estimate, CostEstimate), f"{node.op}: {estimate} is no CostEstimate"
                        check_estimate(estimate, node)

    def test_more_work_costs_no_less(self, cost_model: CostModel) -> None:
        """Ops on tensors of twice the size do not cost less."""
        small, large = perceptron(8, 32), perceptron(16, 64)
        device = topology().devices[0]
        for less, larger in zip(small.nodes, large.nodes, strict=True):
            if not _estimates(cost_model, less):
                continue
            first, second = cost_model.estimate(small, less, device), cost_model.estimate(large, larger, device)
            if first is not None and second is not None:
                assert second.seconds >= first.seconds, f"{less.op}: larger tensors have a shorter time"
                assert second.flops >= first.flops, f"{less.op}: larger tensors have fewer flops"


def _estimates(cost_model: CostModel, node: Node) -> bool:
    return not cost_model.operations or node.operation in cost_model.operations
