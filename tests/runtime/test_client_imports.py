"""Libraries that `import djinn` and a client of a server leave alone, and the logging of the program."""

from __future__ import annotations

import subprocess
import sys

SERVERS_ONLY = ("aiohttp", "cryptography", "prometheus_client")
WHERE_NEEDED = ("networkx", "psutil", "rich", "structlog")
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
import logging, sys
handlers, before = list(logging.root.handlers), set(sys.modules)  # a simulated macOS has psutil by now
import djinn
assert logging.root.handlers == handlers
assert not logging.getLogger("djinn").handlers
found = set({LIBRARIES}) & set(sys.modules) - before
assert not found, found
import torch
layer = torch.nn.Linear(4, 4).to("remote_accelerator:0")
layer(torch.ones(2, 4, device="remote_accelerator:0")).sum().backward()
assert layer.weight.grad.cpu().sum() == 32
print(*(name for name in {SERVERS_ONLY + WHERE_NEEDED} if name in sys.modules and name not in before), "and no more")
"""


def test_a_client_imports_no_more_than_it_needs_and_configures_no_logging(served_environment):
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=served_environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout.strip() == "and no more", done.stdout + done.stderr
