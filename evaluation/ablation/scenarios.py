"""Programs that should be faster on several executors, in simulated time, with the speedups that the design promises.

    python -m evaluation scenarios [--only branches] [--json]

Models are built on the meta device and captured; nothing is computed. Devices are those of `CLUSTER`. Times come from
the planner's simulation (`djinn_core.planning.stages.simulate`), for a run with weights and caches in place.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

import djinn
from djinn_client.interception.recording.substitute import rewrite
from djinn_core.errors import DoesNotFit
from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.stream import ALONE, Stream
from djinn_core.planning.request import PluginOverrides, Plugins
from djinn_profiler.plans.cluster import read_cluster
from djinn_profiler.plans.cluster_plan import ClusterPlan, plan_for_cluster, planning_plugins

CLUSTER = """
client = {{ gbs = 12.5, us = 20 }}
network = {{ gbs = {gbs}, us = {us} }}
[[machines]]
name = "node"
count = {count}
devices = 1
memory_gib = 80
tflops = 100
gbs = 2000
"""
Model = tuple[nn.Module, tuple[Any, ...]]


def cluster(count: int, gbs: float = 25.0, us: float = 10.0) -> NetworkTopology:
    """Return `count` devices of 100 TFLOP/s, 2 TB/s and 80 GiB, with links of `gbs` GB/s between them."""
    return read_cluster(CLUSTER.format(count=count, gbs=gbs, us=us))


@attrs.frozen
class Scenario:
    """A program with its promised speedup.

    Attributes:
        build: function that returns the model, on the meta device, and its inputs.
        promised: speedup in the design, as text.
        stream: number of inputs that follow each other without waiting. With several, intervals are compared, not latencies.
        options: fields of `Request`.
        gbs: bandwidth of the link between devices, in GB/s.
        instead: alternative to the two-device plan: its name in the table, and its options.
    """

    name: str
    build: Callable[[], Model]
    promised: str
    stream: int = 0
    options: Mapping[str, Any] = attrs.field(factory=lambda: {"exact": False})
    gbs: float = 25.0
    instead: tuple[str, Mapping[str, Any]] | None = None

    def graph(self) -> Graph:
        """Return the captured program."""
        with torch.device("meta"):
            model, inputs = self.build()
        with djinn.capture() as capture, torch.no_grad():
            outputs = model.eval()(*inputs)
        del outputs
        return capture.graph

    def plans(self, graph: Graph, count: int, plugins: Plugins, **options: Any) -> list[ClusterPlan]:
        """Return the plans for `count` devices: one plan, or, for a stream in rotation, one plan per device."""
        topology = cluster(count, self.gbs)
        turns = [device.id for device in topology.devices] if self.stream else [""]
        streams = [Stream(self.stream, turn) if turn and count > 1 else ALONE for turn in turns]
        settings = {**self.options, "rewrite": rewrite, **options}
        leave_out = settings.pop("without", "")
        rest = PluginOverrides(plugins, optimizations=tuple(o for o in plugins.optimizations if o.name != leave_out))
        return [plan_for_cluster(graph, topology, rest, stream=stream, **settings) for stream in streams]


def seconds_of(plans: Sequence[ClusterPlan]) -> float:
    """Return the seconds of one run. For a stream, return the interval, which is the time of the busiest device or link."""
    if len(plans) == 1:
        return plans[0].timeline.seconds
    busy: dict[object, float] = {}
    for plan in plans:
        lines = {**{n: d.busy for n, d in plan.timeline.devices.items()}, **plan.timeline.links}
        for name, seconds in lines.items():
            busy[name] = busy.get(name, 0.0) + seconds
    return max(busy.values()) / len(plans)


# --- models


class Branches(nn.Module):
    """An image branch of 200 ms and a text branch of 150 ms on one device, joined by 50 ms of work."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.vision, self.text, self.fusion = (encoder(width, layers) for layers in (24, 18, 6))
        self.table = nn.Embedding(32000, width)
        self.patches = nn.Conv2d(3, width, 16, 16)

    def forward(self, pictures: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        features = self.vision(self.patches(pictures).flatten(2).transpose(1, 2))
        output: torch.Tensor = self.fusion(features + self.text(self.table(tokens)))
        return output[:, 0]


def encoder(width: int, layers: int) -> nn.Sequential:
    """Return layers of attention and a feed-forward network, each as a separate module."""
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


class Layer(nn.Module):
    """One layer of a transformer without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (p.unflatten(-1, (16, -1)).transpose(1, 2) for p in self.projections(self.before(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        output: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.between(x))))
        return output


def branches() -> Model:
    """Return the model with branches of 200 and 150 ms."""
    return Branches(), (torch.zeros(32, 3, 256, 256), torch.zeros(32, 256, dtype=torch.long))


class Hidden(nn.Module):
    """A causal language model that returns the last token's logits and the caches."""

    def __init__(self, layers: int, **sizes: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))

    def forward(self, tokens: torch.Tensor, cache: Any = None) -> Any:
        out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits, out.past_key_values


LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}


def long_prompt() -> Model:
    """Return a prompt of 16,384 tokens for the first eight layers of a Llama 8B."""
    model = Hidden(8, vocab_size=32000, max_position_embeddings=1 << 17, **LLAMA_8B)
    return model, (torch.zeros(1, 16384, dtype=torch.long),)


def decoding() -> Model:
    """Return a decode step for 8 texts of 4,096 tokens through 30 layers of a Llama 70B in float32: 105 GB of weights."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(30):
        cache.update(torch.zeros(8, 8, 4096, 128), torch.zeros(8, 8, 4096, 128), layer)
    return Hidden(30, vocab_size=32000, **LLAMA_70B), (torch.zeros(8, 1, dtype=torch.long), cache)


def convolutions() -> Model:
    """Return sixteen convolutions with batch norms, for 32 images."""
    width = 256
    stages: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(16):
        stages += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
    return nn.Sequential(*stages, *head), (torch.zeros(32, 3, 56, 56),)


class Towers(nn.Module):
    """Two towers: `left` reads the result of `made`, and `right` the sum of the results of `made` and `own`."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Linear(16, width), *encoder(width, 1))
        self.own = nn.Sequential(nn.Linear(16, width), *encoder(width, 3))
        self.left, self.right = encoder(width, 4), encoder(width, 1)

    def forward(self, small: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.made(small)
        return self.left(output).mean(1), self.right(output + self.own(other)).mean(1)


def towers() -> Model:
    """Return a model in which 2 MB of input expand to 134 MB in 12 ms."""
    return Towers(), (torch.zeros(16, 2048, 16), torch.zeros(16, 2048, 16))


class Recommender(nn.Module):
    """Twenty-six tables of 8 GB, and networks for the looked-up rows."""

    def __init__(self, tables: int, rows: int, width: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        met = width + (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(met, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = self.dense(numbers)
        features = torch.stack([dense, *(table(ids[i]).sum(1) for i, table in enumerate(self.tables))], 1)
        products = features @ features.transpose(1, 2)
        row, column = torch.tril_indices(features.shape[1], features.shape[1], -1, device=products.device)
        output: torch.Tensor = self.top(torch.cat([dense, products[:, row, column]], 1))
        return output


def recommender() -> Model:
    """Return tables of 104 GB in total, and 4,096 visits with 20 ids per field."""
    return Recommender(26, 7_812_500), (torch.zeros(4096, 13), torch.zeros(26, 4096, 20, dtype=torch.long))


PINS = (("made*", "node0/cuda:0"), ("left*", "node0/cuda:0"), ("own*", "node1/cuda:0"), ("right*", "node1/cuda:0"))
PINNED: Mapping[str, Any] = {"policy": "pinned", "pins": PINS}
BLIND = "placed blindly", {"policy": "round_robin"}
SENT = "sent", {"without": "recomputation"}
SCENARIOS = (
    Scenario("long prompt", long_prompt, "two executors faster than one (S6)"),
    Scenario("CNN, a stream of batches", convolutions, "throughput near 2x (S7)", stream=4),
    Scenario("CNN, one large batch", convolutions, "throughput near 2x (S7)"),
    Scenario("multimodal branches", branches, "400 to 250 ms, 1.6x (S8)", options={}),
    Scenario("recomputation, 1 Gbit/s", towers, "computed again, faster (S9)", options=PINNED, gbs=0.125, instead=SENT),
    Scenario("recomputation, 400 Gbit/s", towers, "sent (S9)", options=PINNED, gbs=50, instead=SENT),
    Scenario("decoding, 105 GB of weights", decoding, "no KV cache moves (S5)", instead=BLIND),
    Scenario("recommender tables, 104 GB", recommender, "indices are sent, not rows", instead=BLIND),
)


@attrs.frozen
class Row:
    """Figures of one scenario: milliseconds of a run, and bytes sent between devices.

    `one_ms` is None if one device cannot hold the program. `other_*` are figures of the alternative plan.
    """

    name: str
    promised: str
    one_ms: float | None
    two_ms: float
    two_bytes: int
    how: str
    instead: str = ""
    other_ms: float | None = None
    other_bytes: int | None = None

    @property
    def gain(self) -> float | None:
        """Time on one device divided by time on two, or None."""
        return None if self.one_ms is None else self.one_ms / self.two_ms


def sent_by(plans: Sequence[ClusterPlan]) -> int:
    """Return the bytes between devices of one run."""
    return sum(device.sent for plan in plans for device in plan.timeline.devices.values()) // len(plans)


def measure(scenario: Scenario, plugins: Plugins) -> Row:
    """Return the figures of plans for one device, for two devices, and of the alternative plan."""
    graph = scenario.graph()
    try:
        one: float | None = seconds_of(scenario.plans(graph, 1, plugins, **without_pins(scenario))) * 1e3
    except DoesNotFit:
        one = None
    plans = scenario.plans(graph, 2, plugins)
    row = Row(scenario.name, scenario.promised, one, seconds_of(plans) * 1e3, sent_by(plans), describe_plan(plans[0]))
    if scenario.instead is None:
        return row
    name, options = scenario.instead
    others = scenario.plans(graph, 2, plugins, **options)
    return attrs.evolve(row, instead=name, other_ms=seconds_of(others) * 1e3, other_bytes=sent_by(others))


def without_pins(scenario: Scenario) -> dict[str, Any]:
    """Return options that place everything on one device, if the scenario has pins, otherwise none."""
    return {"policy": "single", "pins": ()} if "pins" in scenario.options else {}


def describe_plan(plan: ClusterPlan) -> str:
    """Return a short description of the plan."""
    result = plan.result
    assert result.placement is not None
    assert result.plan is not None
    assert plan.first.plan is not None
    names = [r.optimization for r in (*plan.first.plan.results, *result.plan.results) if r.applied]
    names += ["replicas"] if result.placement.replicas else []
    return f"{result.placement.policy} on {len(result.placement.devices)}: {', '.join(dict.fromkeys(names)) or 'as written'}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only scenarios whose names contain this text")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plugins = planning_plugins()
    rows = [measure(scenario, plugins) for scenario in SCENARIOS if options.only in scenario.name]
    print("| scenario | promised | one device | two devices | gain | sent | how | instead |\n|" + " --- |" * 8)
    for row in rows:
        one = "does not fit" if row.one_ms is None else f"{row.one_ms:.4g} ms"
        gain = "" if row.gain is None else f"{row.gain:.2f}x"
        other = (
            "" if row.other_bytes is None else f"{row.instead}: {row.other_ms:.4g} ms, {row.other_bytes / 1e6:,.1f} MB"
        )
        two = f"{row.two_ms:.4g} ms | {gain} | {row.two_bytes / 1e6:,.1f} MB"
        print(f"| {row.name} | {row.promised} | {one} | {two} | {row.how} | {other} |")
    if options.json:
        print(json.dumps([attrs.asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
