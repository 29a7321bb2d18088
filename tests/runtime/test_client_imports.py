"""Libraries that `import djinn` and a client of a server leave alone, and the logging of the program."""

from __future__ import annotations

import subprocess
import sys

SERVERS_ONLY = ("aiohttp", "cryptography", "prometheus_client")
WHERE_NEEDED = ("networkx", "psutil", "rich", "statistics", "structlog")
# Of Djinn itself: what plans, and other servers that stand by. The server has loaded the same plugins, so that their kinds are kept.
OWN = ("djinn_core.ir.graph", "djinn_core.runtime.standby.connection")
MODULES_LIMIT = 175  # of Djinn after `import djinn`: 174
ATTRS_LIMITS = 17, 27  # classes that attrs has compiled, after `import djinn` and after a first tensor: 16 and 26
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
def compiled():
    found = {{one for name, m in list(sys.modules.items()) if name.startswith("djinn_core") for one in vars(m).values() if isinstance(one, type)}}
    return sorted(f"{{one.__module__}}.{{one.__name__}}" for one in found if "__attrs_attrs__" in vars(one) and one.__module__.startswith("djinn"))
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
modules = sum(name.partition(".")[0] in ("djinn", "djinn_core") for name in sys.modules)
assert modules <= {MODULES_LIMIT}, modules
assert len(found := compiled()) <= {ATTRS_LIMITS[0]}, (len(found), found)
layer = torch.nn.Linear(4, 4).to("remote_accelerator:0")
assert len(found := compiled()) <= {ATTRS_LIMITS[1]}, (len(found), found)
assert not full, full
layer(torch.ones(2, 4, device="remote_accelerator:0")).sum().backward()
assert layer.weight.grad.cpu().sum() == 32
print(*(n for n in {SERVERS_ONLY + WHERE_NEEDED + OWN} if n in sys.modules and n not in before), "and no more")
"""


def test_a_client_imports_no_more_than_it_needs_and_configures_no_logging(served_environment):
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=served_environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout.strip() == "and no more", done.stdout + done.stderr
