"""The planner in a process without the device, its native library and the server."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

for name in ("djinn_client", "djinn_native", "djinn_server"):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError

import torch

from djinn.planning import fx_graph, plan_for_cluster, read_cluster

NODE = 'name = "node"\\ncount = COUNT\\ndevices = 1\\nmemory_gib = 80\\ntflops = 100\\ngbs = 2000'
CLUSTER = "client = { gbs = 100, us = 1 }\\nnetwork = { gbs = 25, us = 10 }\\n[[machines]]\\n" + NODE


class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)])
        self.right = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)])

    def forward(self, left, right):
        return self.left(left).sum() + self.right(right).sum()


with torch.device("meta"):
    model, inputs = Towers(), (torch.zeros(4096, 4096), torch.zeros(4096, 4096))
graph = fx_graph(torch.fx.symbolic_trace(model), *inputs)
apart, alone = (plan_for_cluster(graph, read_cluster(CLUSTER.replace("COUNT", count))) for count in "21")
assert len(apart.result.placement.devices) == 2, apart.result.placement
assert apart.result.placement.policy == "cost_based", "the plugins that plan are found"
assert apart.timeline.seconds < 0.6 * alone.timeline.seconds, (apart.timeline, alone.timeline)
assert apart.first_timeline.uploaded > apart.timeline.uploaded > 0
"""


def test_planning_needs_no_client_or_server():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
