"""Text that `djinn.explain` prints, and its JSON."""

from __future__ import annotations

import json

import attrs
import msgspec
import pytest
import torch
from small_models import Layer, Tower

import djinn
from djinn_core.ir.costs import Calibration, DeviceCapabilities, NetworkTopology
from djinn_core.ir.placement import HintUse
from djinn_core.ir.profile import DataResidency, ExecutionPhase, PatternMatch
from djinn_core.ir.result import PipelineResult, TrialTimes
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import Request
from djinn_core.planning.units import duration, share, size, work
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_profiler.explain.described import describe
from djinn_profiler.explain.text import explain, tree

TREE = """\
                         phase    ops        work    moved     time  share  holds
Tower                    forward   11  1.44 kFLOP  3.38 kB  22.3 µs   100%  1.10 kB weights
├─ first  Linear         forward    1    192 FLOP    304 B  2.03 µs     9%  160 B weights
├─ layers.0-2 x3  Layer  forward    9  1.15 kFLOP  2.88 kB  18.3 µs    82%  864 B weights
│  │  · unit x3 (0.91): a linear layer in node 1 and what follows; width 8
│  │  · → nothing follows from it
│  ├─ linear  Linear     forward    3  1.15 kFLOP  1.44 kB  6.14 µs    28%  864 B weights
│  ├─ function  ReLU     forward    3           -    576 B  6.06 µs    27%
│  └─ (add)              forward    3           -    864 B  6.09 µs    27%
└─ last  Linear          forward    1     96 FLOP    192 B  2.02 µs     9%  72 B weights"""


@pytest.fixture(scope="module")
def result() -> PipelineResult:
    """Return the plan of a tower of three layers by built-in plugins, with one match per layer."""
    registry = load_registry(Selection(plugins=()), builtins=builtin_plugins())
    with torch.device("meta"):
        model, x = Tower([Layer(8) for _ in range(3)]), torch.zeros(3, 4)
    with djinn.capture() as captured, torch.no_grad():
        model(x)
    topology = NetworkTopology((DeviceCapabilities("here", "cpu"),))
    made = plan(captured.graph, registry, Request(topology))
    weights = {
        v: DataResidency.PERSISTENT_WEIGHT for v in captured.graph.inputs if len(captured.graph.meta(v).shape) < 3
    }
    weights.pop(captured.graph.inputs[0])  # x
    matches = [
        PatternMatch(
            "unit", (n, n + 1), 0.9 + n / 100, f"a linear layer in node {n} and what follows", details={"width": 8}
        )
        for n in (1, 4, 7)
    ]
    phases = (ExecutionPhase.FORWARD,) * len(captured.graph.nodes)
    profile = attrs.evolve(made.profile, patterns=tuple(matches), phases=phases, residency=weights)
    return attrs.evolve(made, profile=profile)


def test_explain_tree_text(result) -> None:
    told = "\n".join(tree(describe(result)["modules"]))
    assert told == TREE


def test_explain_tree_unfolded_and_truncated(result) -> None:
    unfolded = explain(result, unfold=True)
    assert "layers.1  Layer" in unfolded
    assert "layers.0-2" not in unfolded
    assert "layers.0-2 x3" in explain(result, depth=1)
    assert "function" not in explain(result, depth=1)
    assert repr(unfolded) == str(unfolded)


MEASURED = {"clever": TrialTimes(5e-3, 3e-3, 9)}


class PluginDecision(msgspec.Struct, forbid_unknown_fields=True):
    about: str
    by: str
    decision: str
    seconds_before: float | None
    seconds_after: float | None
    measured: dict[str, float] | None


class Match(msgspec.Struct, forbid_unknown_fields=True):
    pattern: str
    count: int
    confidence: float
    reason: str
    details: dict[str, object]
    decisions: list[PluginDecision]


class Module(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str
    kind: str = msgspec.field(name="class")
    count: int
    calls: int
    ops: int
    running: int
    phases: dict[str, int]
    devices: dict[str, int]
    operations: dict[str, int]
    dearest: list[str]
    bytes_by_residency: dict[str, int]
    patterns: list[Match]
    parts: list[Module]
    flops: float | None = None
    bytes_moved: int | None = None
    seconds: float | None = None


class Explanation(msgspec.Struct, forbid_unknown_fields=True):
    graph: dict[str, object]
    annotate: dict[str, object]
    modules: Module
    seconds: dict[str, float]
    estimate: dict[str, object] | None = None
    optimize: dict[str, object] | None = None
    place: dict[str, object] | None = None
    schedule: dict[str, object] | None = None


def test_match_names_decision_and_gain(result) -> None:
    hints = {"branches": ((1, 2),), "groups": ((1, 2),), "tables": (3,), "colocate": ()}
    first, *rest = result.profile.patterns
    first = attrs.evolve(first, hints=hints, residency={result.graph.inputs[0]: DataResidency.STATEFUL_KV_CACHE})
    uses = (HintUse("branches", "each branch runs on a device", 4e-3, 2e-3),)
    placement = attrs.evolve(result.placement, policy="clever", uses=uses)
    profile = attrs.evolve(result.profile, patterns=(first, *rest))
    placed = attrs.evolve(result, profile=profile, placement=placement)
    for measured, told in ({}, "not measured"), (MEASURED, "measured 5.00 ms to 3.00 ms (9 runs each)"):
        text = explain(attrs.evolve(placed, trial_times=measured))
        lines = " ".join(text.replace("│", " ").split("├")[2].split()).split("· ")
        at = next(n for n, line in enumerate(lines) if line.startswith("unit"))
        assert [line.removeprefix("→ ").strip() for line in lines[at + 1 : at + 5]] == [
            f"branches (clever): each branch runs on a device, predicted 4.00 ms to 2.00 ms, {told}",
            "groups (clever): not used: this policy does not read it",
            "tables (clever): not used: this policy does not read it",
            "memory (executor): `kv_session` finds these values as a KV cache",
        ]
    (found,) = describe(attrs.evolve(result, profile=profile))["modules"]["parts"][1]["patterns"][:1]
    assert [made["about"] for made in found["decisions"]] == ["branches", "groups", "tables", "memory"]


def test_predicted_times_name_assumed_speeds(result) -> None:
    device = DeviceCapabilities("here", "cpu", flops=19.5e12, bandwidth=1.6e12)
    assumed = attrs.evolve(result, topology=NetworkTopology((device,)))
    assert "assumed speeds of 19.5 TFLOP/s and 1.60 TB/s: `djinn calibrate` measures them" in str(explain(assumed))
    measured = attrs.evolve(device, calibration=Calibration("0"))
    assert "(measured speeds)" in str(explain(attrs.evolve(result, topology=NetworkTopology((measured,)))))


def test_explain_json_schema(result) -> None:
    described = msgspec.json.decode(json.dumps(explain(result).described), type=Explanation)
    whole = described.modules
    assert whole.ops == sum(part.ops for part in whole.parts) == described.graph["nodes"]
    assert whole.flops == pytest.approx(sum(part.flops or 0 for part in whole.parts))
    (layers,) = (part for part in whole.parts if part.count == 3)
    assert (layers.path, layers.kind) == ("layers.0", "Layer")
    assert [(f.pattern, f.count, f.confidence) for f in layers.patterns] == [("unit", 3, pytest.approx(0.91))]
    without_costs = attrs.evolve(result, costs=None, plan=None, placement=None, schedule=None)
    assert msgspec.json.decode(json.dumps(describe(without_costs)), type=Explanation).modules.seconds is None


def test_plugin_facts_are_serialized_to_json(result) -> None:
    odd = {"a": {1: {2, 3}}, "b": torch.float32, "c": (None, 1.5)}
    (match, *_) = result.profile.patterns
    profile = attrs.evolve(result.profile, patterns=(attrs.evolve(match, details=odd),))
    (found,) = json.loads(json.dumps(describe(attrs.evolve(result, profile=profile))))["annotate"]["patterns"]
    assert found["details"] == {"a": {"1": [2, 3]}, "b": "torch.float32", "c": [None, 1.5]}


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (size(999), "999 B"),
        (size(999_600), "1.00 MB"),
        (size(2_100_000), "2.10 MB"),
        (work(3.29e13), "32.9 TFLOP"),
        (duration(0), "0 s"),
        (duration(1.5e-9), "1.50 ns"),
        (duration(0.0123), "12.3 ms"),
        (duration(75), "75.0 s"),
        (share(1, 1000), "<1%"),
        (share(0, 0), "0%"),
    ],
)
def test_quantities_are_formatted_with_units(said: str, read: str) -> None:
    assert said == read
