"""Time to place and schedule an unknown program, verification included.

    python -m evaluation.benchmarks.bench_placing [--json] [--quick] [--case schedule_ms_1000x4]

Programs have a thousand ops: steps of a GPT-2 (one device is best), and a model with two branches (two devices are).
Policy `cost_based`, scheduler `parallel`; devices are only described. Every round starts with a graph with known costs,
as the earlier stages leave it. Values are processor time.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time

import attrs
import torch

import djinn
from djinn.planning import read_cluster
from djinn_core.hookspecs.placement_policies import PlacementContext
from djinn_core.hookspecs.schedulers import SchedulingContext
from djinn_core.ir.graph import Graph
from djinn_core.planning.builtins.costs import Roofline
from djinn_core.planning.builtins.placement import SingleDevice
from djinn_core.planning.builtins.scheduling import Sequential
from djinn_core.planning.stages.annotate import annotate
from djinn_core.planning.stages.estimate import estimate
from djinn_core.planning.stages.optimize import starting_plan
from djinn_core.planning.stages.place import place
from djinn_core.planning.stages.schedule import schedule
from djinn_costs.cost_based import CostBased
from djinn_schedulers.parallel import Parallel
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main

CLUSTER = """
network = { gbs = 12.5, us = 20 }
rack = { gbs = 50, us = 10 }
[[machines]]
name = "node"
count = COUNT
rack = 5
devices = DEVICES
memory_gib = 80
tflops = 0.2
gbs = 100
link = { gbs = 25, us = 5 }
"""
ROUNDS = 12


class Branches(torch.nn.Module):
    """Two encoders whose results are combined."""

    def __init__(self, layers: int):
        super().__init__()
        self.sides = torch.nn.ModuleList(
            torch.nn.TransformerEncoder(
                torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True), layers
            )
            for _ in range(2)
        )
        self.head = torch.nn.Linear(512, 10)

    def forward(self, *inputs):
        return self.head(torch.cat([side(x).mean(1) for side, x in zip(self.sides, inputs, strict=True)], -1))


@functools.cache
def branches(small: bool) -> Graph:
    model = Branches(2 if small else 16).eval()
    with djinn.capture() as capture, torch.no_grad():
        model.to("remote_accelerator:0")
        result = model(*(torch.randn(4, 64, 256).to("remote_accelerator:0") for _ in range(2)))
    del result
    return capture.graph


@functools.cache
def steps(small: bool) -> Graph:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2 if small else 14, n_embd=256, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0)
    ).eval()
    with djinn.capture() as capture, torch.no_grad():
        model.to("remote_accelerator:0")
        inputs = torch.zeros(1, 8, dtype=torch.long).to("remote_accelerator:0")
        cache = model(inputs, use_cache=True).past_key_values
        result = model(inputs[:, :1], past_key_values=cache)
    del result, cache
    return capture.graph


def measure(machines: int, effort: Effort) -> Outcome:
    """Return the median processor milliseconds to place and schedule the slower program on `machines` machines."""
    topology = read_cluster(CLUSTER.replace("COUNT", str(machines)).replace("DEVICES", str(4 if machines == 1 else 8)))
    results: dict[str, float] = {}
    for make in (steps, branches):
        scheduling = make(effort.small)
        took, peak = [], 0
        for _ in range(effort.times(ROUNDS) + 1):
            graph = Graph(scheduling.program, scheduling.modules)
            profile = annotate(graph, ())
            plan, costs = starting_plan(graph, profile), estimate(graph, [Roofline()], topology)
            where = PlacementContext(graph, profile, plan, costs, topology, {})
            gc.collect()
            start = time.thread_time()
            placement = place(where, CostBased(), SingleDevice())
            order = SchedulingContext(graph.program, graph, plan, placement, costs, topology)
            output = schedule(order, Parallel(), Sequential())
            took.append(time.thread_time() - start)
            peak = len(output.steps)
        results |= {f"{make.__name__} ms": statistics.median(took[1:]) * 1e3, f"{make.__name__} devices": peak}
        results[f"{make.__name__} nodes"] = len(scheduling.nodes)
    return Outcome(max(v for k, v in results.items() if k.endswith(" ms")), results)


def thousand(effort: Effort) -> Outcome:
    outcome = measure(125, effort)
    return attrs.evolve(outcome, value=outcome.value / 1e3)


CASES = (
    Case("schedule_ms_1000x4", 20, lambda effort: measure(1, effort), "ms"),
    Case("schedule_s_1000x1000", 2, thousand, "s"),
)

if __name__ == "__main__":
    main("Placing and scheduling a new program", CASES)
