"""Source text of programs with which `try_release.py` tests an installed release. A program raises if a test fails."""

# Of a client: twenty steps give bitwise what they give on this machine.
TRAIN = """\
import torch, djinn


def train(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
    inputs, labels = torch.randn(256, 64), torch.randint(0, 10, (256,))
    model, inputs, labels = model.to(device), inputs.to(device), labels.to(device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses).cpu(), *(p.detach().cpu() for p in model.parameters())]


for remote, local in zip(train("remote_accelerator:0"), train("cpu"), strict=True):
    assert torch.equal(remote, local), (remote - local).abs().max()
assert djinn.stats()["round_trips"]
"""

# Of an environment without what only servers need: nothing of it can be imported. The names follow as arguments.
ABSENT = """\
import sys
from importlib.util import find_spec

found = [name for name in sys.argv[1:] if find_spec(name)]
assert not found, found
"""

# Of a client without a server: the first use names the commands that add the package of servers.
ALONE = """\
import torch, djinn

try:
    torch.ones(2, device="remote_accelerator:0").cpu()
except djinn.errors.StartupError as error:
    assert "pip install ./djinn_server" in str(error), error
    assert "pip install FOLDER/djinn_server-*.whl" in str(error), error
    print(error)
else:
    raise AssertionError("it has started an executor")
"""

# Of a planner: a graph is scheduled on two described devices, and nothing of clients and servers is imported.
PLAN = """\
import sys

import djinn
from djinn_profiler.explain.text import explain
from djinn.testing import ProgramBuilder, topology
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import Request
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection

program = ProgramBuilder()
value = program.input(64, 64)
for _ in range(6):
    product = program.op("aten::mm", value, program.input(64, 64), shape=(64, 64))
    value = program.op("aten::relu", product, shape=(64, 64))
graph = program.graph()

schedule = djinn.compat.Scheduler(topology(2)).create_schedule(graph)
assert sorted(id for group in schedule.groups for id in group.nodes) == sorted(node.id for node in graph.nodes), schedule
registry = load_registry(Selection(strict=True), builtins=builtin_plugins())
planned = plan(graph, registry, Request(topology(2), placement_policy="cost_based", scheduler="pipeline"))
assert planned.schedule.scheduler == "pipeline" and "pipeline" in explain(planned), planned
imported = [name for name in sys.modules if name.startswith(("djinn_client", "djinn_server"))]
assert not imported, imported
"""
