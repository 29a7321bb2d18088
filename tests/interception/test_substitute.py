"""Programs with other computation in the place of some nodes, before anything runs."""

from __future__ import annotations

import pytest
import torch

import djinn
from djinn_client.interception.recording.substitute import rewrite
from djinn_core.errors import InvalidStage
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import storage_of
from djinn_core.ir.substitution import Substitution


class DoublingModel(torch.nn.Module):
    def forward(self, given):
        return (given.sigmoid() * 2).view(-1)[1:] + 1


@pytest.fixture
def program():
    with djinn.capture() as captured:
        made = DoublingModel()(torch.zeros(2, 3))
    del made
    return captured.graph.program


def substitute(program, compute, op="sigmoid"):
    graph = Graph(program)
    (node,) = (graph.nodes[n] for n in graph.by_op[op])
    return rewrite(program, [Substitution(frozenset({node.id}), node.inputs, node.outputs, compute)], frozenset())


def test_unsubstituted_nodes_are_unchanged(program):
    made = substitute(program, lambda given: [1 / (1 + (-given[0]).exp())]).program
    ops, before = ([call.op for call in p.calls] for p in (made, program))
    assert "aten::exp" in ops
    assert "aten::sigmoid" not in ops
    assert ops[-2:] == before[-2:]
    assert made.calls[-1] is program.calls[-1]
    assert made.module_path(len(made) - 1) == program.module_path(len(program) - 1)
    assert "test_substitute.py" in made.site(1)


def test_substitution_keeps_base_of_views(program):
    graph = Graph(substitute(program, lambda given: [given[0].tanh().view(3, 2).view(2, 3).clone()]).program)
    for node in graph.nodes:
        if node.operation in {"view", "slice"}:
            assert storage_of(node.outputs[0]) == storage_of(node.inputs[0])


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda given: [torch.rand_like(given[0])], "random"),
        (lambda given: [given[0] * given[0].sum().item()], "needs data"),
        (lambda given: [given[0].sum()], r"float32 tensor of shape \(2, 3\)"),
        (lambda given: given[0] * 2, "returns a torch.float32"),
        (lambda given: [given[0]], "clone it"),
    ],
    ids=["random", "data", "shape", "no list", "an input"],
)
def test_invalid_substitution_raises(program, compute, message):
    sent = djinn.stats()["submissions"]
    with pytest.raises(InvalidStage, match=message):
        substitute(program, compute)
    assert djinn.stats()["submissions"] == sent


def test_substitutions_differ_by_inputs():
    def compute(given):
        return given

    one, same, other = (Substitution(frozenset({n}), (1,), (2,), compute) for n in (3, 3, 4))
    assert one == same
    assert one != other


class WritesDerived(torch.nn.Module):
    """A model that later writes into a value that an op derived from a weight."""

    def forward(self, weight):
        made = weight.sigmoid()
        made.add_(1)
        return made * 2


@pytest.mark.parametrize("compute", [lambda given: [given[0].view(3, 2).view(2, 3)], lambda given: [given[0].tanh()]])
def test_written_substitute_results_have_own_memory(compute):
    weight = torch.zeros(2, 3, device="remote_accelerator:0")
    with djinn.capture() as captured:
        made = WritesDerived()(weight)
    del made
    graph = captured.graph
    node = graph.nodes[graph.by_op["sigmoid"][0]]
    substitution = Substitution(frozenset({node.id}), node.inputs, node.outputs, compute)
    rewritten = rewrite(graph.program, [substitution], frozenset(node.inputs))
    assert not rewritten.recipes or not {storage_of(v) for r in rewritten.recipes for v in r.placeholders} & {
        storage_of(v) for n in Graph(rewritten.program).nodes for v in n.writes
    }
    written = [v for n in Graph(rewritten.program).nodes for v in n.writes]
    assert written == list(node.outputs)
    assert storage_of(written[0]) != storage_of(node.inputs[0])


class ReadsDataDependentShape(torch.nn.Module):
    """A model that reads a result whose shape depends on data."""

    def forward(self, given):
        where = torch.ones(2, 3, device=given.device).nonzero()
        return given.sigmoid()[where[:, 0], where[:, 1]]


def test_rewrite_keeps_executor_metadata():
    with djinn.capture() as captured:
        made = ReadsDataDependentShape()(torch.zeros(2, 3))
    program = captured.graph.program
    rewritten = substitute(program, lambda given: [given[0].tanh()]).program
    assert [call for call in rewritten.calls if call.op != "aten::tanh"] == [
        call for call in program.calls if call.op != "aten::sigmoid"
    ]
    del made
