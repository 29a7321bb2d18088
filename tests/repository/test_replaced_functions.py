"""Djinn replaces few functions of PyTorch, because the next PyTorch may call others, and registers its kernels from C++."""

from __future__ import annotations

import json
import re

SCRIPT = """\
import importlib, inspect, json, sys

for name in (
    "torch", "torch.accelerator", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.export", "torch.fx", "torch.library", "torch.multiprocessing", "torch.nn", "torch.optim",
    "torch.nn.attention.flex_attention", "torch.random", "torch.serialization", "torch.testing", "torch.utils.checkpoint",
    "torch.utils.data", "torch.utils.dlpack", "torch.fx.experimental.proxy_tensor",
):
    importlib.import_module(name)


def attributes():
    found = {}
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] != "torch" or module is None:
            continue
        for name, held in list(vars(module).items()):
            found[path, name] = held
            if inspect.isclass(held) and str(held.__module__).partition(".")[0] == "torch":
                found |= {(f"{held.__module__}.{held.__qualname__}", n): member for n, member in list(vars(held).items())}
    return found


def place(member):
    for function in (member, getattr(member, "fget", None), getattr(member, "__func__", None)):
        if (code := getattr(function, "__code__", None)) is not None:
            return code.co_filename
    return ""


before = attributes()
import djinn, torch

layer = torch.nn.Linear(2, 2).to("remote_accelerator")
layer(torch.ones(1, 2, device="remote_accelerator")).sum().backward()
owners = {owner for owner, _ in before}
changed = [
    (owner, name, place(member))
    for (owner, name), member in attributes().items()
    if owner in owners and before.get((owner, name)) is not member and place(member)
]
print(json.dumps(changed))
"""
REPLACED = {
    "OptimizeContext.__call__",  # functions with remote tensors are not compiled on this machine
    "compile_fx",  # the same for graphs that make remote tensors
    "init_device_mesh",  # a name with an underscore is no name with an index
    "_validate_device",  # flex attention runs on the device
    "_tensor_str",  # elements that are printed come in one round trip
    "_engine_run_backward",  # a backward pass on the caller's thread
    "Module.__call__",  # paths of modules
    "Module._apply",  # parameters that are moved come in one round trip
    "TransformerEncoder.forward",  # zeros for padding
    "Tensor.tolist",  # numbers that the client knows
    "save",  # storages in one round trip; addresses
    "load",  # addresses
}
ADDED = {"Tensor.remote"}


def short(owner, name):
    """`Class.name` of a method; the name alone of a function of a module."""
    last = owner.rpartition(".")[2]
    return f"{last}.{name}" if last[:1].isupper() else name


def test_few_functions_of_pytorch_are_replaced(python, served_environment):
    done = python.run("-W", "ignore", "-c", SCRIPT, env=served_environment, capture_output=True, text=True, check=True)
    changed = json.loads(done.stdout.splitlines()[-1])
    by_pytorch = "backend_registration.py"  # which names the device
    found = {short(owner, name) for owner, name, file in changed if not file.endswith(by_pytorch)}
    assert found - ADDED == REPLACED
    assert len(REPLACED) <= 12


def test_kernels_are_registered_in_cpp(root):
    files = [
        *(root / "djinn_core").rglob("*.py"),
        *(root / "djinn_client").rglob("*.py"),
        *(root / "plugins").rglob("djinn_*/**/*.py"),
    ]
    found = [file.name for file in files if re.search(r"library\.Library\(|\blibrary\.impl\(", file.read_text())]
    assert found == []
