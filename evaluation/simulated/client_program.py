"""A typical client: trains, generates, queries and leaves. Prints its results.

`argv`: a connection file, then in turn `here` for a local executor, or a transport to disable.
"""

import contextlib
import os
import select
import sys
from pathlib import Path

import torch

import djinn
from djinn.testing import open_connections
from djinn_core.system import tcp

WINDOWS = not hasattr(select, "poll")
assert not hasattr(select, "epoll"), "this is not simulated"
assert not Path("/proc/self/statm").exists()
assert WINDOWS or tcp.MAX_PATH_BYTES == 103
assert hasattr(os, "fork") != WINDOWS
DEVICE = "remote_accelerator:0"


def trained(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.arange(64.0).reshape(8, 8).to(device) / 64
    y = (torch.arange(8) % 4).to(device)
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def generated(device):
    torch.manual_seed(1)
    table, head = torch.randn(50, 16).to(device), torch.randn(16, 50).to(device)
    tokens = torch.tensor([3], device=device)
    for _ in range(20):
        token = (table[tokens].mean(0) @ head).argmax()
        tokens = torch.cat([tokens, token.reshape(1)])
    return tokens.tolist()


def used():
    """Use the device in typical ways."""
    assert [round(loss, 4) for loss in trained(DEVICE)] == [round(loss, 4) for loss in trained("cpu")]
    assert generated(DEVICE) == generated("cpu")
    large = torch.randn(3 << 20)
    assert torch.equal((large.to(DEVICE) * 2).cpu(), large * 2)
    with contextlib.suppress(djinn.errors.RemoteIndexError):
        torch.ones(3, device=DEVICE)[torch.tensor([7], device=DEVICE)].tolist()
        raise SystemExit("the index is out of bounds")
    print(f"urls {[connection.url for connection in open_connections()]}")


for way in sys.argv[2:]:
    djinn.configure()
    if way == "here":
        djinn.configure(threads=1)
    else:
        djinn.configure(connection_file=sys.argv[1], disable=["local", way], threads=1)
    used()
    if way != sys.argv[-1]:
        djinn.shut_down()
if not WINDOWS:
    child = os.fork()
    if not child:  # only the child would need a client; the parent's session is not touched
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("trained, generated")
djinn.shut_down()
