"""Patterns in a few words: what they find, in graphs of either making, and what they leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import djinn
from djinn.planning import (
    ACTIVATION,
    anything,
    fx_graph,
    linear,
    matcher,
    op,
    through,
)
from djinn.testing import PatternConformance, ProgramBuilder

MLP = matcher(
    "mlp",
    linear()["up"] >> op(ACTIVATION)["act"] >> linear()["down"],
    confidence=0.9,
    reason="{act} stands between {up} and {down}",
    details=lambda matched_nodes: {"width": matched_nodes.meta("up").shape[-1]},
)
GATED = matcher(
    "gated",
    op("mul")(linear()["gate"] >> op("silu"), linear()["up"]) >> linear(),
    confidence=0.95,
    reason="{gate} gates {up}",
)


class GeluAndGatedMlps(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gate = nn.Linear(8, 16, bias=False)

    def forward(self, x):
        x = x + self.b(nn.functional.gelu(self.a(self.norm(x))).double().float())
        return x + self.b(self.a(x) * nn.functional.silu(self.gate(x)))


def export_graph(model, x):
    return fx_graph(torch.export.export(model, (x,)))


def trace_graph(model, x):
    def run(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    return fx_graph(make_fx(run, tracing_mode="fake")(dict(model.named_parameters()), x))


def capture_graph(model, x):
    with djinn.capture() as program:
        model.to("remote_accelerator:0")(x.to("remote_accelerator:0"))
    return program.graph


def matches(pattern, graph):
    return list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))


@pytest.mark.parametrize("make", [export_graph, trace_graph, capture_graph])
def test_layers_match_in_graphs_of_any_origin(make):
    graph = make(GeluAndGatedMlps(), torch.rand(2, 5, 8))
    (mlp,), (gated,) = matches(MLP, graph), matches(GATED, graph)
    assert mlp.details == {"width": 16}
    assert "gelu" in mlp.reason
    covered = {graph.nodes[n].operation for n in mlp.nodes}
    assert "gelu" in covered
    assert covered & {"_to_copy", "to"}
    assert {"silu", "mul"} <= {graph.nodes[n].operation for n in gated.nodes}
    assert gated.confidence == 0.95


def chain_of(*operations):
    builder = ProgramBuilder()
    value = builder.input(4, 4)
    for name in operations:
        value = builder.op(f"aten::{name}", value, shape=(4, 4))
    return builder.graph()


def matched_nodes(term, graph):
    return [m.nodes for m in matches(matcher("x", term, confidence=1.0, reason="because"), graph)]


def test_matcher_supports_alternatives_options_and_runs():
    graph = chain_of("mm", "mul", "div", "tanh", "neg")
    assert matched_nodes(op("tanh", "silu") >> op("neg"), graph) == [(3, 4)]
    assert matched_nodes((op("silu") | op("tanh")) >> op("neg"), graph) == [(3, 4)]
    assert matched_nodes(op("silu") >> op("neg"), graph) == []
    assert matched_nodes(op("mm") >> through("mul", "div") >> op("tanh"), graph) == [(0, 1, 2, 3)]
    assert matched_nodes(op("mm") >> through("mul", "div", limit=1) >> op("tanh"), graph) == []
    assert matched_nodes(op("neg").where(lambda at: at.result.shape == (4, 4)), graph) == [(4,)]
    assert matched_nodes(op("neg").where(lambda at: at.result.shape == (5, 5)), graph) == []


def test_matcher_checks_operand_order_and_repetition():
    builder = ProgramBuilder()
    x = builder.input(4, 4)
    a = builder.op("aten::tanh", x, shape=(4, 4))
    builder.op("aten::mul.Tensor", x, a, shape=(4, 4))  # 1
    builder.op("aten::div.Tensor", x, a, shape=(4, 4))  # 2
    builder.op("aten::mul.Tensor", a, a, shape=(4, 4))  # 3
    graph = builder.graph()
    assert matched_nodes(op("mul")(op("tanh"), anything()), graph) == [(0, 1), (0, 3)]
    assert matched_nodes(op("div")(op("tanh"), anything()), graph) == []
    assert matched_nodes(op("div")(anything(), op("tanh")), graph) == [(0, 2)]
    assert matched_nodes(op("mul")(anything("x"), anything("x")), graph) == [(3,)]


def test_matcher_checks_conditions_of_runs():
    builder = ProgramBuilder()
    scores, mask = builder.input(4, 4), builder.input(4)
    a = builder.op("aten::tanh", scores, shape=(4, 4))
    b = builder.op("aten::exp", mask, shape=(4,))
    builder.op("aten::neg", builder.op("aten::add.Tensor", a, b, shape=(4, 4)), shape=(4, 4))
    graph = builder.graph()
    assert matched_nodes(op("exp") >> through("add") >> op("neg"), graph) == [(1, 2, 3)]
    assert matched_nodes(op("exp") >> through("add", widest=True) >> op("neg"), graph) == []
    assert matched_nodes(op("tanh") >> through("add", widest=True) >> op("neg"), graph) == [(0, 2, 3)]
    assert matched_nodes(op("tanh") >> through("add", where=lambda at: len(at.operands) == 1) >> op("neg"), graph) == []


def test_matcher_follows_in_place_and_view_writes():
    def write_in_place(x):
        y = torch.tanh(x).clone()
        y.view(-1)[2:].mul_(2.0)
        y.relu_()
        return torch.neg(y)

    graph = fx_graph(make_fx(write_in_place, tracing_mode="fake")(torch.rand(3, 3)))
    assert matched_nodes(op("relu") >> op("neg"), graph)
    assert matched_nodes(op("mul") >> op("relu"), graph)
    assert matched_nodes(op("tanh") >> op("mul"), graph)
    assert not matched_nodes(op("tanh") >> op("relu"), graph)  # what it sees was written in between


INNER = op("native_layer_norm", "layer_norm")(anything("source")) >> linear() >> op("gelu") >> linear()["down"]
RESIDUAL = matcher(
    "residual",
    op("add")(anything("source"), INNER)["add"],
    confidence=0.9,
    reason="{add} adds {down} to what is normalised",
)


def test_repeated_name_matches_residual_branch():
    class Block(nn.Module):
        def __init__(self, skip):
            super().__init__()
            self.skip, self.inner, self.first = skip, GeluAndGatedMlps(), nn.Linear(8, 8)

        def forward(self, x):
            y = self.first(x)
            inner = self.inner
            return (y if self.skip else x) + inner.b(nn.functional.gelu(inner.a(inner.norm(y))))

    for make in (export_graph, trace_graph):
        (match,) = matches(RESIDUAL, make(Block(skip=True), torch.rand(2, 8)))
        assert match.reason.startswith("aten::add")
        assert matches(RESIDUAL, make(Block(skip=False), torch.rand(2, 8))) == []


def test_matcher_refuses_unrestricted_term():
    with pytest.raises(djinn.errors.ConfigurationError, match="may end with any op"):
        matcher("all", anything(), confidence=1.0, reason="always")
    with pytest.raises(TypeError, match=r'op\("relu"\) >> op\("exp"\)'):
        op("exp", op("relu"))
    with pytest.raises(TypeError, match="not iterable"):
        list(op("exp"))
    with pytest.raises(TypeError, match="nothing can flow into"):
        op("tanh") >> anything()


class TestMlp(PatternConformance):
    @pytest.fixture
    def pattern(self):
        return MLP

    @pytest.fixture
    def recognised(self):
        builder = ProgramBuilder()
        x, up, down = builder.input(4, 8), builder.input(8, 16), builder.input(16, 8)
        hidden = builder.op("aten::relu", builder.op("aten::mm", x, up, shape=(4, 16)), shape=(4, 16))
        builder.op("aten::mm", hidden, down, shape=(4, 8))
        return {"two layers": builder.graph()}


class TestResidual(PatternConformance):
    @pytest.fixture
    def pattern(self):
        return RESIDUAL
