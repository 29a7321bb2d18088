"""Peak memory of a program by kind of value."""

from __future__ import annotations

import attrs
import pytest

from djinn.hooks import CostModel
from djinn.planning import CostEstimate, DataResidency, DeviceCapabilities, NetworkTopology, work_of
from djinn.testing import ProgramBuilder
from djinn_commands.planning.peak import peak_of
from djinn_core.planning.pipeline import plan as run_stages
from djinn_core.planning.request import Request
from djinn_core.registry.registry import Registry

KIB = 1024


class WorkSpace(CostModel):
    """A cost model that counts only bytes."""

    name = "work_space"

    def estimate(self, graph, node, device):
        del device
        return CostEstimate(0.0, 0, 0, 0.0, self.name, workspace=work_of(graph, node).workspace)


def plan_graph(graph, residency=None, devices=1):
    topology = NetworkTopology(tuple(DeviceCapabilities(f"{n}/cpu:0", "cpu") for n in range(devices)))
    result = run_stages(
        graph, Registry(cost_models=(WorkSpace(),)), Request(topology, resident=dict.fromkeys(graph.inputs, "0/cpu:0"))
    )
    return attrs.evolve(result, profile=attrs.evolve(result.profile, residency=residency or {}))


def chain_graph():
    """Return a graph with a 1 KiB input, a 64 KiB weight, and two 1 KiB results. The first result is freed."""
    builder = ProgramBuilder()
    x, weight = builder.input(2, 128), builder.input(128, 128)
    first = builder.op("aten::mm", x, weight, shape=(2, 128))
    builder.op("aten::relu", first, shape=(2, 128))
    builder.dead.add(first)
    return builder.graph(), x, weight


def test_peak_counts_each_storage_once_by_kind():
    graph, _, weight = chain_graph()
    found = peak_of(plan_graph(graph, {weight: DataResidency.PERSISTENT_WEIGHT}))
    assert found.kinds == {"weights": 64 * KIB, "activations": 3 * KIB}
    assert found.bytes == 67 * KIB
    assert found.most["weights"] == 64 * KIB
    assert found.left == {"weights": 64 * KIB, "activations": 2 * KIB}
    assert found.largest_step == 66 * KIB  # the matrix product: both operands and the result


def test_peak_counts_unread_caches_as_activations():
    graph, x, _ = chain_graph()
    result = plan_graph(graph, {x: DataResidency.STATEFUL_KV_CACHE})
    assert peak_of(result).kinds["cache"] == KIB
    assert "cache" not in peak_of(result, caches=False).kinds


def test_peak_counts_operand_copies_of_convolutions():
    builder = ProgramBuilder()
    x, weight = builder.input(1, 4, 16, 16), builder.input(4, 4, 1, 1)
    builder.op("aten::conv2d", x, weight, shape=(1, 4, 16, 16))
    assert peak_of(plan_graph(builder.graph())).bytes == (4 + 4 + 4) * KIB + 2 * 64


def test_unscheduled_program_has_no_peak():
    graph, *_ = chain_graph()
    with pytest.raises(ValueError, match="schedule"):
        peak_of(attrs.evolve(plan_graph(graph), schedule=None))
