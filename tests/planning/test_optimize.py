"""Optimizations are ordered, verified, attributed and costed by the driver."""

from __future__ import annotations

import attrs
import pytest

from djinn.hooks import Optimization
from djinn.testing import ProgramBuilder, optimization_context
from djinn_core.errors import InvalidStage
from djinn_core.ir.plan import OptimizationPlan, OptimizationResult, Rewrite
from djinn_core.planning.stages.optimize import in_execution_order, optimize
from djinn_core.planning.stages.verify_rewrite import check_rewrite

SQUARE = (3, 3)


@attrs.define
class FixedOptimization(Optimization):
    """An optimization that proposes one rewrite, or raises it."""

    name: str
    rewrite: Rewrite | Exception = attrs.field(factory=Rewrite)
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()

    def optimize(self, context):
        del context
        if isinstance(self.rewrite, Exception):
            raise self.rewrite
        return OptimizationResult(self.name, bool(self.rewrite), "fixed", self.rewrite)


def test_declared_order_precedes_name_order():
    names = [
        o.name
        for o in in_execution_order([
            FixedOptimization("c"), FixedOptimization("b", after=frozenset({"d"})), FixedOptimization("a", after=frozenset({"missing"})),
            FixedOptimization("d"), FixedOptimization("e", before=frozenset({"a"})),
        ])
    ]  # fmt: skip
    assert names == ["c", "d", "b", "e", "a"]


def test_optimization_order_cycle_is_broken():
    circle = [
        FixedOptimization("a", after=frozenset({"b"})),
        FixedOptimization("b", after=frozenset({"a"})),
        FixedOptimization("c"),
    ]
    assert [o.name for o in in_execution_order(circle)] == ["c", "a", "b"]


def duplicate_tanh():
    """Return a graph with two equal tanh ops, of which only the second is used."""
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    first = builder.op("aten::tanh", x, shape=SQUARE)
    second = builder.op("aten::tanh", x, shape=SQUARE)
    result = builder.op("aten::neg", second, shape=SQUARE)
    builder.drop(first, second)
    return builder.graph(), first, second, result


def test_legal_rewrite_is_applied_and_costed():
    graph, first, second, _ = duplicate_tanh()
    context = optimization_context(graph)
    plan = optimize(context, [FixedOptimization("merge", Rewrite(frozenset({1}), {second: first}))])
    assert plan.nodes == (0, 2)
    assert plan.replace == {second: first}
    (result,) = plan.results
    assert result.applied
    assert result.seconds_before == pytest.approx(3e-6)
    assert result.seconds_after == pytest.approx(2e-6)


def test_illegal_rewrite_is_dropped_and_reported(caplog):
    graph, first, second, _ = duplicate_tanh()
    context = optimization_context(graph)
    merge = FixedOptimization("merge", Rewrite(frozenset({1}), {second: first}))
    plan = optimize(
        context,
        [
            FixedOptimization("a_raises", ValueError("oops")),
            FixedOptimization("b_illegal", Rewrite(frozenset({0, 1}))),
            merge,
        ],
    )
    assert plan.nodes == (0, 2)
    assert [r.applied for r in plan.results] == [False, False, True]
    assert "a_raises" in plan.results[0].reason
    assert "oops" in plan.results[0].reason
    assert "still used" in plan.results[1].reason
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 2
    assert any("a_raises" in w for w in warnings)
    assert any("b_illegal" in w for w in warnings)


def test_rewrite_replacement_chains_are_resolved():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    a, b, c = (builder.op("aten::tanh", x, shape=SQUARE) for _ in range(3))
    builder.op("aten::neg", c, shape=SQUARE)
    builder.drop(a, b, c)
    steps = [
        FixedOptimization("1", Rewrite(frozenset({2}), {c: b})),
        FixedOptimization("2", Rewrite(frozenset({1}), {b: a})),
    ]
    plan = optimize(optimization_context(builder.graph()), steps)
    assert plan.replace == {c: a, b: a}


def assert_refused(builder: ProgramBuilder, rewrite: Rewrite, message: str) -> None:
    graph = builder.graph()
    kept = frozenset((*graph.inputs, *graph.outputs))
    everything = OptimizationPlan(tuple(n.id for n in graph.nodes))
    with pytest.raises(InvalidStage, match=message) as refused:
        check_rewrite(graph, everything, rewrite, kept, "optimization 'x' (module)")
    assert "optimization 'x' (module)" in str(refused.value)


def test_random_ops_are_never_dropped():
    builder = ProgramBuilder()
    drawn = builder.op("aten::rand_like", builder.input(*SQUARE), shape=SQUARE, random=True)
    builder.drop(drawn)
    assert_refused(builder, Rewrite(frozenset({0})), "random state")


def test_visible_writes_are_never_dropped():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    builder.inplace("aten::mul_.Scalar", builder.view("aten::t", x, shape=SQUARE), slots=(2.0,))
    assert_refused(builder, Rewrite(frozenset({1})), "write to value")


def test_writes_read_by_later_op_are_never_dropped():
    builder = ProgramBuilder()
    x = builder.op("aten::tanh", builder.input(*SQUARE), shape=SQUARE)
    builder.inplace("aten::mul_.Scalar", x, slots=(2.0,))
    builder.op("aten::neg", x, shape=SQUARE)
    builder.drop(x)
    assert_refused(builder, Rewrite(frozenset({1})), "write to value")


def test_held_values_are_never_dropped():
    builder = ProgramBuilder()
    builder.op("aten::tanh", builder.input(*SQUARE), shape=SQUARE)
    assert_refused(builder, Rewrite(frozenset({0})), "the client still holds")


@pytest.mark.parametrize("written", ["first", "second"])
def test_written_values_are_never_merged(written: str):
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    values = {n: builder.op("aten::tanh", x, shape=SQUARE) for n in ("first", "second")}
    builder.inplace("aten::mul_.Scalar", values[written], slots=(2.0,))
    builder.op("aten::add.Tensor", *values.values(), shape=SQUARE)
    builder.drop(*values.values())
    rewrite = Rewrite(frozenset({1}), {values["second"]: values["first"]})
    assert_refused(builder, rewrite, "one of them is written")


def test_replacement_with_other_metadata_or_later_node_is_refused():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    early, wide = builder.op("aten::tanh", x, shape=SQUARE), builder.op("aten::tanh", x, shape=(3, 4))
    late = builder.op("aten::tanh", x, shape=SQUARE)
    builder.op("aten::add.Tensor", early, wide, shape=SQUARE)
    builder.drop(early, wide, late)
    assert_refused(builder, Rewrite(frozenset({1}), {wide: early}), "other metadata")
    assert_refused(builder, Rewrite(frozenset({0}), {early: late}), "computed after")


def test_rewrite_with_unmet_slot_conditions_is_refused():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    a, b = (builder.op("aten::mul.Scalar", x, shape=SQUARE, slots=(s,)) for s in (1, 1.0))
    builder.op("aten::add.Tensor", a, b, shape=SQUARE)
    builder.drop(a, b)
    assert_refused(builder, Rewrite(frozenset({1}), {b: a}, equal_slots=((0, 1),)), "slots 0 and 1 are equal")


def test_cyclic_replacements_are_refused():
    graph, first, second, _ = duplicate_tanh()
    plan = optimize(
        optimization_context(graph),
        [FixedOptimization("circle", Rewrite(frozenset({0, 1}), {second: first, first: second}))],
    )
    assert plan.nodes == (0, 1, 2)
    assert "circle" in plan.results[0].reason
