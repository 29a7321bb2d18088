"""A few of the architectures of evaluation/results/unseen.md are recognised as it says. All of them: `python -m evaluation unseen`."""

from __future__ import annotations

import attrs
import pytest

from djinn.planning import Tier
from djinn_client.runtime.client import registry
from djinn_core.ir.graph import Graph
from djinn_core.planning.stages.annotate import annotate
from evaluation.semantics.labelled_zoo import LABELLED, labelled
from evaluation.semantics.scoring import NAMES, least, score

# Attention in landmarks, in blocks, by feature maps, over neighbours; a text tower; recommenders.
FEW = (
    "nystromformer_landmarks performer linear_transformer efficient_attention longnet sliding_window talking_heads yoso "
    "graph_attention clip_text dcn_v2_stacked dlrm_packed gated_cross_network fibinet"
)


@pytest.mark.parametrize("name", FEW.split())
def test_unseen_architectures_are_recognised_by_structure(embedded, name, monkeypatch):
    monkeypatch.setitem(LABELLED, name, attrs.evolve(LABELLED[name], situations=("forward",)))
    (program,) = labelled(name)
    graph = Graph(attrs.evolve(program.program, modules=(), sites=()))
    found = score(program, annotate(graph, registry().patterns, tiers=frozenset({Tier.STRUCTURE})))
    assert any(i.required for i in program.truth.instances)
    assert {pattern: found.patterns[pattern].missed for pattern in NAMES} == dict.fromkeys(NAMES, ())
    assert not [j.match.reason for p in found.patterns.values() for j in p.judged if j.right is False]
    assert found.workload
    assert not found.wrong_phases


def test_unseen_list_is_long_and_disjoint():
    unseen = {name for name, entry in LABELLED.items() if entry.part == "unseen"}
    assert len(unseen) >= 60
    assert len({LABELLED[name].family for name in unseen}) >= 10


def test_lower_confidence_bound():
    assert least(0, 0) is None
    assert least(190, 190) == pytest.approx(0.980, abs=0.001)  # no mistake in 190
    assert least(90, 100) == pytest.approx(0.8256, abs=0.001)
