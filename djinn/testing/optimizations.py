"""Conformance suite for optimizations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import pytest

from djinn.testing.comparing import compare_results, example_inputs
from djinn.testing.contexts import optimization_context, placement_context, spread
from djinn.testing.programs import sample_programs
from djinn.testing.replaying import replay
from djinn.testing.suite import OnGraphs, missing, require_protocol
from djinn_core.hookspecs.optimizations import Optimization, OptimizationContext
from djinn_core.ir.graph import Graph
from djinn_core.ir.plan import OptimizationResult
from djinn_core.planning.stages.verify_rewrite import check_rewrite
from djinn_core.planning.stages.verify_substitution import check_substitutions

if TYPE_CHECKING:
    from djinn_profiler.captured import Captured


class OptimizationConformance(OnGraphs):
    """Tests that every optimization must pass.

    Subclass this class and define the fixture `optimization`. Override `programs` to add your own programs.
    """

    @pytest.fixture
    def optimization(self) -> Optimization:
        """Return the optimization under test."""
        return missing(self, "optimization", "your optimization")  # type: ignore[return-value]

    @pytest.fixture
    def programs(self) -> Mapping[str, Captured]:
        """Return small programs to run with and without the optimization. Override this fixture to add your own."""
        return sample_programs()

    def test_optimization_has_every_member(self, optimization: Optimization) -> None:
        """The optimization has all attributes and methods of `Optimization`.

        `before` and `after` do not contain its own name.
        """
        require_protocol(optimization, "optimizations")
        assert optimization.name not in optimization.before | optimization.after, (
            "`before` or `after` contains its own name"
        )

    def test_wants_returns_a_bool(self, optimization: Optimization, graphs: Mapping[str, Graph]) -> None:
        """`wants` returns True or False for programs of any ops."""
        for ops in (frozenset[str](), *(frozenset(node.op for node in graph.nodes) for graph in graphs.values())):
            assert isinstance(optimization.wants(ops), bool), f"{optimization.name}: `wants` must return a bool"

    def test_rewrites_are_legal(self, optimization: Optimization, graphs: Mapping[str, Graph]) -> None:
        """Rewrites have no observable effect on the results of a program."""
        for name, graph in graphs.items():
            _judge(optimization, optimization_context(graph), name)

    def test_rewrites_keep_held_values(self, optimization: Optimization, graphs: Mapping[str, Graph]) -> None:
        """Rewrites have no observable effect if the caller holds every value until the end."""
        for name, graph in graphs.items():
            every = frozenset((*graph.inputs, *(value for node in graph.nodes for value in node.outputs)))
            _judge(optimization, attrs.evolve(optimization_context(graph), kept=every), name)

    def test_optimize_is_deterministic(self, optimization: Optimization, graphs: Mapping[str, Graph]) -> None:
        """`optimize` returns equal results for equal contexts."""
        for name, graph in graphs.items():
            context = optimization_context(graph)
            assert optimization.optimize(context) == optimization.optimize(context), f"{name}: two different results"

    def test_rewritten_program_computes_equal_results(
        self, optimization: Optimization, graphs: Mapping[str, Graph], programs: Mapping[str, Captured]
    ) -> None:
        """The rewritten program, with its substitutions, computes the final values of the recorded program."""
        runnable = {name: graph for name, graph in graphs.items() if _runs_here(graph)}
        applied = [
            name
            for name, program in (runnable | dict(programs)).items()
            if compare_results(optimization, program).applied
        ]
        if not applied:
            pytest.skip(
                f"{optimization.name} rewrote none of the programs, so no results were compared: override the "
                "fixture `programs` with programs that it rewrites (`djinn.testing.compare_results` takes a context)"
            )

    def test_second_pass_runs_after_placement(self, optimization: Optimization, graphs: Mapping[str, Graph]) -> None:
        """If the optimization declares a second pass, it also runs after placement."""
        if not optimization.after_placement:
            pytest.skip("the optimization declares no second pass")
        for name, graph in graphs.items():
            network = placement_context(graph, devices=2).topology
            placed = attrs.evolve(optimization_context(graph, devices=2), placement=spread(graph, network))
            _judge(optimization, placed, name)


def _judge(optimization: Optimization, context: OptimizationContext, graph: str) -> None:
    result = optimization.optimize(context)
    assert isinstance(result, OptimizationResult), f"{graph}: {result} is no OptimizationResult"
    assert result.optimization == optimization.name, f"{graph}: `optimization` is {result.optimization!r}"
    assert result.reason, f"{graph}: the result has no reason"
    assert result.applied or not result.rewrite, f"{graph}: the result has a rewrite, but `applied` is False"
    author = f"{optimization.name} on {graph}"
    check_rewrite(context.graph, context.plan, result.rewrite, context.kept, author)
    check_substitutions(context.graph, context.plan, result.rewrite.substitutions, context.kept, author)


def _runs_here(graph: Graph) -> bool:
    """Return True if every op of a graph can be called. Hand-written graphs may contain ops that do not exist."""
    try:
        replay(graph, example_inputs(graph))
    except Exception:
        return False
    return True
