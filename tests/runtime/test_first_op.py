"""The first ops of a program import nothing of PyTorch that it does not use; what it does use works as without Djinn."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading

from djinn_client import torch_tracing

FIRST = """
import sys, torch, djinn
HEAVY = ("torch.distributed.tensor", "torch._dynamo")
def there():
    return [name for name in HEAVY if name in sys.modules]
x = torch.ones(4, 4).to("remote_accelerator:0")
assert ((x * 2 + 1) @ x).sum().item() == 192
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


def test_the_first_op_imports_no_dynamo_and_both_work_afterwards(served_environment, tmp_path):
    text = FIRST + DTENSOR.replace("FILE", repr(str(tmp_path / "store"))) + DYNAMO
    command = [sys.executable, "-W", "ignore", "-c", text]  # an interpreter of its own: forked ones have imported both
    ended = subprocess.run(command, env=served_environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_thread_that_imports_dtensors_while_they_are_spared_finds_the_real_ones(monkeypatch, tmp_path):
    (tmp_path / "real_dtensors.py").write_text("class DTensor: ...")  # PyTorch's own cannot be imported twice
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch_tracing, "_DTENSOR_MODULE", "real_dtensors")
    found: dict[str, object] = {}
    other = threading.Thread(target=exec, args=("from real_dtensors import DTensor", found))

    def import_meanwhile(*_: object) -> None:
        other.start()
        other.join(0.2)

    monkeypatch.setattr(torch_tracing._RuleProbe, "__torch_dispatch__", import_meanwhile)
    monkeypatch.setattr(torch_tracing._DTensorKind, "spared", None)
    torch_tracing.spare_dtensor(lambda *_: None)
    other.join()
    assert found["DTensor"] is importlib.import_module("real_dtensors").DTensor
