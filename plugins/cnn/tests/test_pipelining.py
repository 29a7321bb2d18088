"""Conformance suite for optimizations, and conditions for spreading successive inputs; pools are in `tests/pool`."""

from __future__ import annotations

import attrs

from djinn.planning import CostEstimate, Costs, DataResidency, Stream
from djinn.testing import ProgramBuilder, optimization_context
from djinn_cnn.pipelining import Pipelining


def optimize_stream(builder, seconds=5e-3, devices=4, stream=None, **residency):
    """Return the optimization's result for a program with ops of `seconds`, while its previous run is under way."""
    graph = builder.graph()
    given = optimization_context(graph, devices)
    row = tuple(CostEstimate(0, 0, 0, seconds) for _ in graph.nodes)
    costs = Costs(dict.fromkeys([d.id for d in given.topology.devices], row))
    stream = Stream(1, "server/cpu:1") if stream is None else stream
    profile = attrs.evolve(given.profile, residency=residency.get("residency", {}))
    return Pipelining().optimize(attrs.evolve(given, costs=costs, stream=stream, profile=profile))


def add_product(builder):
    return builder.op("aten::mm", builder.input(8, 8), builder.input(8, 8), shape=(8, 8))


def test_pipelining_uses_as_many_devices_as_client_keeps_busy():
    builder = ProgramBuilder()
    add_product(builder)
    assert optimize_stream(builder).rewrite.hints == {"pipeline": (4,)}
    assert optimize_stream(builder, seconds=1.6e-3).rewrite.hints == {"pipeline": (3,)}
    result = optimize_stream(builder, seconds=5e-4)
    assert not result.applied
    assert result.reason == "the program takes 0.5 ms, and the client takes 0.512 ms to record it: one device is enough"


def test_pipelining_is_not_applied_if_each_result_is_awaited():
    builder = ProgramBuilder()
    add_product(builder)
    assert (
        optimize_stream(builder, stream=Stream()).reason
        == "no program of this structure is pending: the client waited for each result"
    )
    assert optimize_stream(builder, devices=1).reason == "there is one device"


def test_pipelining_is_not_applied_with_state_between_programs():
    builder = ProgramBuilder()
    made = add_product(builder)
    carried = Stream(1, "server/cpu:1", frozenset({made}))
    assert optimize_stream(builder, stream=carried).reason == "the program uses values that an earlier program computed"


def test_pipelining_is_not_applied_if_input_is_written():
    builder = ProgramBuilder()
    state = builder.input(8, 8)
    builder.inplace("aten::add_.Tensor", builder.view("aten::slice.Tensor", state, shape=(4, 8)), builder.input(4, 8))
    assert optimize_stream(builder).reason == "aten::add_.Tensor writes a value that the next program may read"


def test_pipelining_allows_writes_to_own_results():
    builder = ProgramBuilder()
    builder.inplace("aten::relu_", add_product(builder))
    assert optimize_stream(builder).applied


def test_pipelining_is_not_applied_to_random_ops():
    builder = ProgramBuilder()
    builder.op("aten::bernoulli", builder.input(8, 8), shape=(8, 8), random=True)
    assert optimize_stream(builder).reason == "aten::bernoulli draws random numbers, so programs must run in order"


def test_pipelining_is_not_applied_if_a_cache_remains():
    builder = ProgramBuilder()
    made = add_product(builder)
    found = optimize_stream(builder, residency={made: DataResidency.STATEFUL_KV_CACHE})
    assert found.reason == "the program leaves a stateful kv cache to the next program"
