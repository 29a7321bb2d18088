"""Common subexpressions and dead code: dropped and kept nodes. Observable values do not change."""

from __future__ import annotations

import attrs
import pytest
import torch

from djinn.testing import (
    ProgramBuilder,
    optimization_context,
    random_graph,
    random_inputs,
    replay,
)
from djinn_optimizations.cleanup.optimization import CommonSubexpressions, DeadCode

SQUARE = (3, 3)


def run_cleanup(graph):
    """Apply both optimizations in turn. Return the remaining nodes and the substitutes."""
    context = optimization_context(graph)
    merged = CommonSubexpressions().optimize(context).rewrite
    left = tuple(n for n in context.plan.nodes if n not in merged.drop)
    plan = attrs.evolve(context.plan, nodes=left, replace=dict(merged.replace))
    dead = DeadCode().optimize(attrs.evolve(context, plan=plan)).rewrite
    return tuple(n for n in left if n not in dead.drop), dict(merged.replace), merged


@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in range(0, 200, 40)], ids=str)
def test_cleanup_leaves_held_values_unchanged(seeds):
    for seed in seeds:
        graph = random_graph(seed, length=40)
        inputs = random_inputs(graph)
        nodes, replace, _ = run_cleanup(graph)
        expected, got = replay(graph, inputs), replay(graph, inputs, nodes, replace)
        for value in (*graph.outputs, *graph.inputs):
            torch.testing.assert_close(got[value], expected[value], rtol=0, atol=0, equal_nan=True, msg=f"{seed}")


def test_repeated_ops_of_random_programs_are_merged():
    dropped_nodes = [
        len(g.nodes) - len(run_cleanup(g)[0]) for g in (random_graph(seed, length=40) for seed in range(50))
    ]
    assert sum(dropped_nodes) > 150


def repeat_op(**differences):
    """Return a graph that has the same op twice and the sum of both results.

    `differences`: arguments that differ in the second call.
    """
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    first = {"name": "aten::mul.Scalar", "slots": (2.0,), "random": False}
    second = {**first, **differences}
    values = [builder.op(c["name"], x, shape=SQUARE, slots=c["slots"], random=c["random"]) for c in (first, second)]
    return builder, x, values


def dropped_nodes(builder):
    return CommonSubexpressions().optimize(optimization_context(builder.graph())).rewrite.drop


def test_repetition_is_merged_with_slot_conditions():
    builder, _, values = repeat_op()
    builder.op("aten::add.Tensor", *values, shape=SQUARE)
    builder.drop(*values)
    rewrite = CommonSubexpressions().optimize(optimization_context(builder.graph())).rewrite
    assert rewrite.drop == {1}
    assert rewrite.replace == {values[1]: values[0]}
    assert rewrite.equal_slots == ((0, 1),)


def test_cleanup_leaves_timed_ops_unchanged():
    builder, _, values = repeat_op()
    builder.drop(*values)
    assert DeadCode().optimize(optimization_context(builder.graph())).applied
    builder.op("djinn::mark", shape=(0,), dtype=torch.uint8, random=True)
    for optimization in (CommonSubexpressions(), DeadCode()):
        result = optimization.optimize(optimization_context(builder.graph()))
        assert not result.applied
        assert "events" in result.reason


@pytest.mark.parametrize("slot", [3.0, 2, float("nan")])
def test_different_scalars_are_not_merged(slot):
    builder, _, values = repeat_op(slots=(slot,))
    builder.drop(*values)
    assert not dropped_nodes(builder)


@pytest.mark.parametrize(("size", "merged"), [(8, False), (2048, True)])
def test_small_full_is_not_merged(size, merged):
    """The last step of `generate()` fills a flag with a different number. A merge would need a second plan."""
    builder = ProgramBuilder()
    values = [builder.op("aten::full", shape=(size,), slots=(size, 1)) for _ in range(2)]
    builder.op("aten::add.Tensor", *values, shape=(size,))
    builder.drop(*values)
    assert bool(dropped_nodes(builder)) == merged


def test_nan_scalars_are_never_merged():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    values = [builder.op("aten::mul.Scalar", x, shape=SQUARE, slots=(float("nan"),)) for _ in range(2)]
    builder.drop(*values)
    assert not dropped_nodes(builder)


def test_negative_zero_is_not_merged_with_zero():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    values = [builder.op("aten::mul.Scalar", x, shape=SQUARE, slots=(zero,)) for zero in (0.0, -0.0)]
    builder.drop(*values)
    assert not dropped_nodes(builder)


def test_random_ops_are_neither_merged_nor_dead():
    builder, _, values = repeat_op(random=True)
    builder.drop(*values)
    graph = builder.graph()
    assert run_cleanup(graph)[0] == (1,)  # the first op is dead, the second draws random numbers


def test_write_between_equal_ops_prevents_merge():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    before = builder.op("aten::tanh", x, shape=SQUARE)
    builder.inplace("aten::mul_.Scalar", builder.view("aten::t", x, shape=SQUARE), slots=(2.0,))
    after = builder.op("aten::tanh", x, shape=SQUARE)
    builder.drop(before, after)
    assert not dropped_nodes(builder)


def test_write_to_a_result_prevents_merge():
    for written in (0, 1):
        builder, _, values = repeat_op()
        builder.inplace("aten::mul_.Scalar", values[written], slots=(2.0,))
        builder.drop(*values)
        assert not dropped_nodes(builder)


def test_held_result_is_not_merged():
    builder, _, values = repeat_op()
    builder.drop(values[0])
    assert not dropped_nodes(builder)
    builder, _, values = repeat_op()
    view = builder.view("aten::t", values[1], shape=SQUARE)
    builder.drop(*values)
    assert view in builder.graph().outputs
    assert not dropped_nodes(builder)


def test_dead_writes_are_dropped_except_to_inputs():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    temporary = builder.op("aten::tanh", x, shape=SQUARE)
    builder.inplace("aten::mul_.Scalar", temporary, slots=(2.0,))
    builder.inplace("aten::mul_.Scalar", x, slots=(2.0,))
    builder.drop(temporary)
    result = DeadCode().optimize(optimization_context(builder.graph()))
    assert result.rewrite.drop == {0, 1}
    assert "2 ops" in result.reason
