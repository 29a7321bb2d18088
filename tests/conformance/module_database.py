"""Runs PyTorch's databases of modules and optimizers locally and remotely, and compares."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from op_database import DEVICE, SEED, Move, Verdict, compare
from torch.testing._internal.common_device_type import tol
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput, optim_db
from torch.utils import _pytree as pytree

# Sums in another order differ in the last bits, and a layer is many sums.
TOLERANCE = tol(2e-5, 2e-4)
STEPS = 4


def modules() -> Iterator[ModuleInfo]:
    """Entries with float32."""
    return (module for module in module_db if torch.float32 in module.dtypes)


def check_module(module: ModuleInfo, *, samples: int | None) -> Verdict:
    """Compare outputs, and gradients of parameters and inputs, in training and in evaluation."""
    compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for training in (True, False):
            torch.manual_seed(SEED)
            inputs = module.module_inputs_func(module, "cpu", torch.float32, requires_grad=True, training=training)
            for sample in itertools.islice(inputs, samples):
                if sample.forward_input is None:
                    continue
                try:
                    compared += _check_module(module, sample, training)
                except Exception as error:
                    return Verdict(module.name, "failed", f"{type(error).__name__}: {error}", error, compared)
    reason = "" if compared else "no sample runs on the CPU"
    return Verdict(module.name, "passed" if compared else "left out", reason, samples=compared)


def _check_module(module: ModuleInfo, sample: ModuleInput, training: bool) -> bool:
    """Raises what the remote module raises; False where the CPU refuses the sample."""
    made, given = sample.constructor_input, (sample.forward_input.args, sample.forward_input.kwargs)
    torch.manual_seed(SEED)
    try:
        local = module.module_cls(*made.args, **made.kwargs).train(training)
        _run(local, *given)  # lazy modules learn their shapes
        remote = copy.deepcopy(local)
        expected = _run(local, *given)
    except Exception:
        return False
    compare(expected, _run(remote.to(DEVICE), *pytree.tree_map(Move(lambda _: False).value, given)), TOLERANCE)
    return True


def _run(module: torch.nn.Module, args: Any, kwargs: Any) -> list[Any]:
    torch.manual_seed(SEED)
    outputs = pytree.tree_leaves(module(*args, **kwargs))
    wanted = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    sources = [*module.parameters(), *inputs]
    if not wanted or not sources:
        return outputs
    seeds = [torch.ones_like(t) for t in wanted]
    return [*outputs, *torch.autograd.grad(wanted, sources, seeds, allow_unused=True)]


def optimizers() -> Iterator[OptimizerInfo]:
    """Entries for dense gradients."""
    return (optimizer for optimizer in optim_db if not optimizer.only_supports_sparse_grads)


def check_optimizer(optimizer: OptimizerInfo, *, samples: int | None) -> Verdict:
    """Compare parameters and losses after a few steps, with every implementation that PyTorch has."""
    name, compared = optimizer.optim_cls.__name__, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in itertools.islice(optimizer.optim_inputs_func("cpu"), samples):
            for implementation in (
                {},
                *({kind: True} for kind in optimizer.supported_impls if kind != "differentiable"),
            ):
                options = sample.kwargs | implementation
                try:
                    _check_optimizer(optimizer, sample, options)
                except Exception as error:
                    reason = f"{sample.desc} {implementation}: {type(error).__name__}: {error}"
                    return Verdict(name, "failed", reason, error, compared)
                compared += 1
    return Verdict(name, "passed" if compared else "left out", samples=compared)


def _check_optimizer(optimizer: OptimizerInfo, sample: OptimizerInput, options: dict[str, Any]) -> None:
    torch.manual_seed(SEED)
    local = torch.nn.Linear(4, 3, bias=optimizer.optim_cls is not torch.optim.Muon)
    remote = copy.deepcopy(local).to(DEVICE)
    data = torch.randn(6, 4), torch.randn(6, 3)
    compare(
        _optimize(local, data, optimizer, options),
        _optimize(remote, tuple(t.to(DEVICE) for t in data), optimizer, options),
        TOLERANCE,
    )


def _optimize(model: torch.nn.Module, data: Any, info: OptimizerInfo, options: dict[str, Any]) -> list[Any]:
    options = pytree.tree_map(lambda o: o.to(data[0].device) if isinstance(o, torch.Tensor) and o.dim() else o, options)
    optimizer = info.optim_cls(model.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data[0]) - data[1]).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(STEPS)]
    return [*losses, *model.parameters()]
