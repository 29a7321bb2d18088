"""The suite for optimizations."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest

from djinn_core.conformance.contexts import optimization_context, placement_context, spread
from djinn_core.conformance.suite import OnGraphs, missing, require_protocol
from djinn_core.hookspecs.optimizations import Optimization, OptimizationContext
from djinn_core.ir.graph import ProgramGraph
from djinn_core.ir.plan import OptimizationResult
from djinn_core.stages.verify_rewrite import check_rewrite


class OptimizationConformance(OnGraphs):
    """Subclass it and give the fixture `optimization`."""

    @pytest.fixture
    def optimization(self) -> Optimization:
        """The optimization."""
        return missing(self, "optimization", "your optimization")  # type: ignore[return-value]

    def test_it_is_an_optimization(self, optimization: Optimization) -> None:
        """It has every member, and does not wait for itself."""
        require_protocol(optimization, "optimizations")
        assert optimization.name not in optimization.before | optimization.after, "it waits for itself"

    def test_it_changes_no_result(self, optimization: Optimization, graphs: Mapping[str, ProgramGraph]) -> None:
        """Its rewrites are legal: nothing that anybody could observe differs."""
        for name, graph in graphs.items():
            _judge(optimization, optimization_context(graph), name)

    def test_it_keeps_what_somebody_still_holds(
        self, optimization: Optimization, graphs: Mapping[str, ProgramGraph]
    ) -> None:
        """The same where every value is held until the end."""
        for name, graph in graphs.items():
            every = frozenset((*graph.inputs, *(value for node in graph.nodes for value in node.outputs)))
            _judge(optimization, attrs.evolve(optimization_context(graph), kept=every), name)

    def test_it_gives_one_answer(self, optimization: Optimization, graphs: Mapping[str, ProgramGraph]) -> None:
        """The same context, the same result."""
        for name, graph in graphs.items():
            context = optimization_context(graph)
            assert optimization.optimize(context) == optimization.optimize(context), f"{name}: two answers"

    def test_it_may_run_after_placement(self, optimization: Optimization, graphs: Mapping[str, ProgramGraph]) -> None:
        """The second pass, where it asks for one."""
        if not optimization.after_placement:
            pytest.skip("it does not ask for a second pass")
        for name, graph in graphs.items():
            network = placement_context(graph, devices=2).topology
            placed = attrs.evolve(optimization_context(graph, devices=2), placement=spread(graph, network))
            _judge(optimization, placed, name)


def _judge(optimization: Optimization, context: OptimizationContext, graph: str) -> None:
    result = optimization.optimize(context)
    assert isinstance(result, OptimizationResult), f"{graph}: it returned a {type(result).__name__}"
    assert result.optimization == optimization.name, f"{graph}: the result is of {result.optimization!r}"
    assert result.reason, f"{graph}: a result without a reason"
    assert result.applied or not result.rewrite, f"{graph}: a rewrite that is not applied"
    check_rewrite(context.graph, context.plan, result.rewrite, context.kept, f"{optimization.name} on {graph}")
