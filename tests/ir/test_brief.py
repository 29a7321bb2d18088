"""Plans, graphs and what is known of them show themselves in a screenful."""

from __future__ import annotations

import pytest
import torch

import djinn
from djinn.testing import optimization_context, placement_context, scheduling_context, topology


@pytest.fixture(scope="module")
def captured_encoder():
    with torch.device("meta"):
        layers = [torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True) for _ in range(30)]
        model, x = torch.nn.Sequential(*layers).eval(), torch.zeros(1, 4, 16)
    with djinn.capture() as captured_encoder, torch.no_grad():
        y = model(x)
    del y
    return captured_encoder


def test_reprs_are_short(captured_encoder):
    result = djinn.plan(captured_encoder)
    graph = captured_encoder.graph
    contexts = [optimization_context(graph), placement_context(graph, 2), scheduling_context(graph, 2)]
    parts = [result.profile, result.costs, result.plan, result.placement, result.schedule, topology(500)]
    for shown in (
        captured_encoder,
        graph,
        captured_encoder.program,
        result,
        *parts,
        *contexts,
        captured_encoder.program.calls[0],
    ):
        text = repr(shown)
        assert text.startswith(type(shown).__name__) or shown is captured_encoder
        assert len(text) < 3000, text[:500]
        assert text.count("\n") < 50


def test_reprs_show_contents(captured_encoder):
    graph, result = captured_encoder.graph, djinn.plan(captured_encoder, until="annotate")
    assert repr(graph).startswith(f"Graph({len(graph.nodes):,} ops: ")
    assert "linear 120" in repr(graph)
    assert f"phases=<{len(graph.nodes):,} of them>" in repr(result)
    assert "placement=None" in repr(result)
    assert repr(graph.nodes[0]).startswith("Node(id=0, op=")
