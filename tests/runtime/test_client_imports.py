"""What `import djinn`, a client of a server and first ops import, and the logging of the program; what is imported later works as without Djinn."""

from __future__ import annotations

import subprocess
import sys

SERVERS_ONLY = ("aiohttp", "cryptography", "prometheus_client")
WHERE_NEEDED = ("networkx", "psutil", "rich", "statistics", "structlog")
# Of Djinn itself: what plans, and other servers that stand by. The server has loaded the same plugins, so that their kinds are kept.
OWN = ("djinn_core.ir.graph", "djinn_standby.connection")
LIBRARIES = (
    "accelerate",
    "diffusers",
    "lightning",
    "safetensors",
    "sentence_transformers",
    "torch._dynamo",
    "transformers",
)
PROGRAM = f"""
import gc, logging, sys
handlers, before = list(logging.root.handlers), set(sys.modules)  # a simulated macOS has psutil by now
import torch
full = []  # collections that look at everything, of which one is due after PyTorch's import
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
import djinn
assert logging.root.handlers == handlers
assert not logging.getLogger("djinn").handlers
found = set({LIBRARIES}) & set(sys.modules) - before
assert not found, found
assert "pluggy" not in sys.modules
layer = torch.nn.Linear(4, 4).to("remote_accelerator:0")
assert not full, full
layer(torch.ones(2, 4, device="remote_accelerator:0")).sum().backward()
assert layer.weight.grad.cpu().sum() == 32
print(*(n for n in {SERVERS_ONLY + WHERE_NEEDED + OWN} if n in sys.modules and n not in before), "and no more")
"""
FIRST = """
HEAVY = ("torch.distributed.tensor", "torch._dynamo")
def there():
    return [name for name in HEAVY if name in sys.modules]
x = torch.ones(4, 4).to("remote_accelerator:0")
assert ((x * 2 + 1) @ x).sum().item() == 192
q = torch.ones(1, 2, 4, 8, device="remote_accelerator:0", requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
assert q.grad is not None
meta = torch.ones(2, device="meta")
assert torch.nn.functional.softplus((meta * 2).exp() // meta).shape == (2,)
assert there() == [], there()
"""
DTENSOR = """
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", init_method="file://" + FILE, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
plain = torch.arange(16.0).reshape(4, 4)
a = distribute_tensor(plain.clone().requires_grad_(), mesh, [Shard(0)])
b = (a @ distribute_tensor(plain, mesh, [Replicate()])).sum()
b.backward()
assert type(b) is DTensor and torch.equal(a.grad.full_tensor(), torch.ones(4, 4) @ plain.T)
assert isinstance(a, DTensor) and not isinstance(x, DTensor)
assert a.redistribute(mesh, [Replicate()]).to_local().equal(plain)
dist.destroy_process_group()
assert x.sum().item() == 16
"""
DYNAMO = """
f = torch.compile(lambda t: torch.special.erfcx(t) * 2, backend="eager", fullgraph=True)
assert torch.equal(f(torch.ones(3)), torch.special.erfcx(torch.ones(3)) * 2)
from djinn_client.torch_tracing import _kernels_hidden_from_dynamo
kernels = _kernels_hidden_from_dynamo()
assert kernels and all(vars(k).get("__dynamo_disable") is not k for k in kernels)
"""


def test_client_imports_little_and_configures_no_logging(served_environment, tmp_path):
    text = PROGRAM + FIRST + DTENSOR.replace("FILE", repr(str(tmp_path / "store"))) + DYNAMO
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        text,
    ]  # an interpreter of its own: forked ones have imported all of it
    done = subprocess.run(command, env=served_environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "and no more", done.stdout + done.stderr
