"""Number and length of prefill chunks, or no split, by predicted times."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch

import djinn
from djinn.planning import CostEstimate, Costs, DataResidency, Link
from djinn.testing import optimization_context
from djinn_optimizations.prefill import DivideSequences
from djinn_optimizations.prefill.choosing import choose
from djinn_optimizations.prefill.rows import rows_of

ROWS, WIDTH = 512, 16


@pytest.fixture(scope="module")
def graph():
    with torch.no_grad(), djinn.capture():
        words, inward = torch.nn.Embedding(64, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        ids = torch.zeros(1, ROWS, dtype=torch.long)
        with djinn.capture() as captured:
            rows = inward(words(ids))[None]
            made = inward(torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)).relu()
            del rows
    assert made.shape == (1, 1, ROWS, WIDTH)
    return captured.graph


def context_of(graph, linear=10e-3, attention=0.0, devices=2, bandwidth=1e9, memory=0):
    """Return the context of a graph. Ops take `linear` seconds each, attention takes `attention`."""
    given = optimization_context(graph, devices)
    row = tuple(CostEstimate(0, 0, 0, attention if "attention" in n.op else linear) for n in graph.nodes)
    topology = attrs.evolve(
        given.topology,
        devices=tuple(attrs.evolve(device, memory=memory) for device in given.topology.devices),
        links=(*(Link(a.id, b.id, bandwidth, 1e-4) for a, b in itertools.permutations(given.topology.devices, 2)),),
    )
    profile = attrs.evolve(given.profile, residency=dict.fromkeys(graph.inputs, DataResidency.PERSISTENT_WEIGHT))
    costs = Costs({device.id: row for device in topology.devices})
    return attrs.evolve(given, costs=costs, topology=topology, profile=profile)


def chunk_ends(context):
    return choose(context, rows_of(context)).ends


def test_prefill_halves_rows_of_equal_cost(graph):
    assert chunk_ends(context_of(graph)) == (256, ROWS)
    assert chunk_ends(context_of(graph, devices=4)) == (128, 256, 384, ROWS)


def test_later_prefill_chunks_are_shorter_with_attention_cost(graph):
    first, _ = chunk_ends(context_of(graph, linear=1e-3, attention=50e-3))
    assert 256 < first < 400


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"linear": 50e-6}, "512 rows would take"),
        ({"bandwidth": 1e5}, "512 rows would take"),
        ({"memory": 2048}, "weights are too large to copy"),
        ({"devices": 1}, "there is one device"),
    ],
    ids=["short", "slow link", "little memory", "alone"],
)
def test_prefill_chunking_is_not_applied_if_slower(graph, changed, reason):
    result = DivideSequences().optimize(context_of(graph, **changed))
    assert not result.applied
    assert reason in result.reason


def test_prefill_reason_names_chunks_and_times(graph):
    result = DivideSequences().optimize(context_of(graph))
    assert result.applied
    assert result.reason.startswith("512 rows in chunks of 256 and 256: ")
