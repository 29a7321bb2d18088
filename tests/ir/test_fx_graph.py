"""Graphs from torch.export and make_fx: the same nouns, and programs that compute the same."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from djinn.planning import fx_graph
from djinn.testing import replay
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.arguments import arguments, slot_positions
from djinn_core.ir.handles import storage_of


def trace_graph(function, *inputs):
    return fx_graph(make_fx(function, tracing_mode="fake")(*inputs))


class SmallModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.second = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))


def replay_function(function, *inputs):
    graph = trace_graph(function, *inputs)
    got = replay(graph, dict(zip(graph.inputs, inputs, strict=True)))
    return graph, got


def test_program_from_fx_graph_computes_same_values():
    def function(x, w):
        y = (x @ w).view(-1)
        y[2:5].mul_(2.0)
        a, b = y.view(3, 3).split([1, 2])
        return torch.cat([a, b]).softmax(-1), x.t().clone()

    inputs = torch.rand(3, 3), torch.rand(3, 3)
    graph, got = replay_function(function, *inputs)
    for value, expected in zip(graph.outputs, function(*inputs), strict=True):
        torch.testing.assert_close(got[value], expected)


def test_fx_graph_keeps_out_in_place_and_multiple_results():
    def function(x):
        total = torch.empty(3, 3)
        torch.add(x, 1, out=total)
        values, vectors = torch.linalg.eigh(total + total.t())
        return values.neg_(), vectors

    x = torch.rand(3, 3)
    graph, got = replay_function(function, x)
    expected = function(x)
    torch.testing.assert_close(got[graph.outputs[0]], expected[0])
    (out,) = (n for n in graph.nodes if n.op == "aten::add.out")
    assert out.writes == (out.inputs[-1],)
    assert not out.outputs
    (neg,) = (n for n in graph.nodes if n.op == "aten::neg_")
    assert neg.writes == neg.inputs


def test_views_share_storage_and_copies_do_not():
    graph = trace_graph(lambda x: (x.t(), x.reshape(9), x.clone(), x[1:].flatten()), torch.rand(3, 3))
    (x,) = graph.inputs
    shared = [storage_of(v) == storage_of(x) for v in graph.outputs]
    assert shared[:3] == [True, True, False]


def test_eval_dropout_is_not_random():
    graph = trace_graph(
        lambda x: torch.nn.functional.dropout(x, 0.5, training=True) + torch.rand_like(x), torch.rand(3, 3)
    )
    assert [n.operation for n in graph.nodes if n.random] == ["bernoulli_", "rand_like"]
    exported = torch.export.export(torch.nn.Dropout(0.5).eval(), (torch.rand(3, 3),))
    assert not any(n.random for n in fx_graph(exported).nodes)


def test_export_keeps_module_paths_and_outputs():
    graph = fx_graph(torch.export.export(SmallModel().eval(), (torch.rand(5, 4),)))
    assert [(n.operation, n.module) for n in graph.nodes] == [
        ("linear", "first"), ("layer_norm", "norm"), ("relu", ""), ("linear", "second")
    ]  # fmt: skip
    assert graph.outputs == graph.nodes[-1].outputs
    assert len(graph.inputs) == 7


def test_symbolic_sizes_become_numbers():
    class Flat(torch.nn.Module):
        def forward(self, x):
            return x.reshape(x.shape[0] * 2, -1)

    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(Flat(), (torch.rand(6, 4),), dynamic_shapes={"x": {0: batch}})
    graph = fx_graph(exported)
    (reshaped,) = (n for n in graph.nodes if n.outputs)
    assert arguments(reshaped)["shape" if "shape" in arguments(reshaped) else "size"] == [12, -1]


def test_graph_hashes_are_stable_across_reads():
    exported = torch.export.export(SmallModel().eval(), (torch.rand(5, 4),))
    first, second = fx_graph(exported), fx_graph(exported)
    assert first.topology_hash == second.topology_hash
    assert first.shape_hash == second.shape_hash


def test_symbolic_trace_becomes_aten_ops():
    x = torch.rand(5, 4)
    traced_by_fx = torch.fx.symbolic_trace(SmallModel().eval())
    graph = fx_graph(traced_by_fx, x)
    assert [(n.operation, n.module) for n in graph.nodes] == [
        ("linear", "first"), ("layer_norm", "norm"), ("relu", ""), ("linear", "second")
    ]  # fmt: skip
    inputs = [*traced_by_fx.parameters(), x]
    got = replay(
        graph, {v: t.detach() for v, t in zip(graph.inputs, inputs_in_graph_order(graph, inputs), strict=True)}
    )
    torch.testing.assert_close(got[graph.outputs[0]], traced_by_fx(x).detach())


def inputs_in_graph_order(graph, tensors):
    """Return the tensors in the order of the graph's inputs, matched by size."""
    left = list(tensors)
    return [
        left.pop(next(i for i, t in enumerate(left) if tuple(t.shape) == graph.meta(v).shape)) for v in graph.inputs
    ]


def test_shape_prop_metadata_replaces_inputs():
    from torch.fx.passes.shape_prop import ShapeProp

    module = torch.fx.symbolic_trace(SmallModel().eval())
    with pytest.raises(UnsupportedOperation, match="give example inputs"):
        fx_graph(module)
    ShapeProp(module).propagate(torch.rand(5, 4))
    assert (
        fx_graph(module).topology_hash
        == fx_graph(torch.fx.symbolic_trace(SmallModel().eval()), torch.rand(5, 4)).topology_hash
    )


def test_arguments_have_schema_names_and_defaults():
    graph = trace_graph(
        lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), torch.rand(1, 2, 4, 8)
    )
    fused = next(n for n in graph.nodes if "attention" in n.operation)
    given = arguments(fused)
    assert given["query"] == fused.inputs[0]
    assert given["is_causal"] is True
    assert given["scale"] is None
    graph = trace_graph(lambda x: torch.softmax(x.to(torch.float64), -1), torch.rand(2, 2))
    assert [arguments(n).get("dtype") for n in graph.nodes if n.operation == "_to_copy"] == ["float64"]


def test_slot_positions_count_through_program():
    graph = trace_graph(lambda x: (x * 2).view(3, 3) + 1, torch.rand(9))
    positions = list(slot_positions(tuple(graph.nodes)))
    assert [graph.program.slots[p[0] : p[-1] + 1] if p else () for p in map(tuple, positions)] == [
        n.slots for n in graph.nodes
    ]
