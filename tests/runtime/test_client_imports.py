"""Libraries that `import djinn` and a client of a server leave alone, and the logging of the program."""

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


def test_client_imports_little_and_configures_no_logging(served_environment):
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=served_environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout.strip() == "and no more", done.stdout + done.stderr
