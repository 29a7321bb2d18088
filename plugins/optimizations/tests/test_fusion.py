"""Conformance suite for fusion. Whole models are tested in `tests/e2e`."""

from __future__ import annotations

import attrs
import pytest

from djinn.planning import DataResidency
from djinn.testing import ProgramBuilder, optimization_context
from djinn_optimizations.fusion import FuseProjections


@pytest.mark.parametrize(
    ("kind", "rows", "width", "fused"),
    [
        ("cpu", 1, 64, True),
        ("cpu", 2, 64, False),
        ("cpu", 1, 1024, False),
        ("cuda", 1, 64, False),
    ],
)
def test_products_are_fused_if_launch_bound(kind, rows, width, fused):
    builder = ProgramBuilder()
    given, weights = builder.input(rows, width), [builder.input(width, width) for _ in range(2)]
    for weight in weights:
        builder.op("aten::linear", given, weight, shape=(rows, width))
    graph = builder.graph()
    context = optimization_context(graph, devices=1)
    devices = tuple(attrs.evolve(device, kind=kind) for device in context.topology.devices)
    profile = attrs.evolve(context.profile, residency=dict.fromkeys(weights, DataResidency.PERSISTENT_WEIGHT))
    context = attrs.evolve(context, topology=attrs.evolve(context.topology, devices=devices), profile=profile)
    assert FuseProjections().optimize(context).applied == fused
