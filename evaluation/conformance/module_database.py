"""PyTorch's databases of modules and optimizers as programs for comparison."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_device_type import tol
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput, optim_db
from torch.utils import _pytree as pytree

from evaluation.conformance.comparing import SEED
from evaluation.conformance.samples import Copies
from evaluation.conformance.verdicts import Program, Programs, Verdict, judge

STEPS = 4


def tolerance(dtype: torch.dtype) -> tol:
    """Return the tolerance for results of layers, which may sum in another order on the remote device."""
    return tol(2e-5, 2e-4) if dtype == torch.float32 else tol(1e-7, 1e-7)


def modules() -> Iterator[ModuleInfo]:
    """Return all entries."""
    return iter(module_db)


def check_module(module: ModuleInfo, *, samples: int | None) -> Verdict:
    """Compare outputs, buffers, gradients of parameters and inputs in training and evaluation, and errors."""
    return judge(module.name, _module_programs(module, samples), tolerance)


def _module_programs(module: ModuleInfo, count: int | None) -> Programs:
    for dtype, training in itertools.product((torch.float32, torch.float64), (True, False)):
        torch.manual_seed(SEED)
        inputs = module.module_inputs_func(module, "cpu", dtype, requires_grad=True, training=training)
        for number, sample in enumerate(itertools.islice(inputs, count)):
            if sample.forward_input is not None:
                which = f"{dtype}, {'training' if training else 'evaluation'}, sample {number}"
                yield which, _module_program(module, sample, dtype, training)
    if module.module_error_inputs_func is not None:
        for number, wrong in enumerate(
            module.module_error_inputs_func(module, "cpu", torch.float32, requires_grad=False, training=True)
        ):
            yield f"error {number}", _module_program(module, wrong.module_error_input, torch.float32, training=True)


def _module_program(module: ModuleInfo, sample: ModuleInput, dtype: torch.dtype, training: bool) -> Program:
    def program(device: str) -> Any:
        output = sample.constructor_input
        with torch.device("cpu"):
            instance = module.module_cls(*output.args, **output.kwargs).to(dtype).train(training)
            inputs = copy.deepcopy((sample.forward_input.args, sample.forward_input.kwargs))
            if any(isinstance(p, torch.nn.UninitializedParameter) for p in instance.parameters()):
                instance(*inputs[0], **inputs[1])  # lazy modules infer their shapes
        args, kwargs = pytree.tree_map(Copies(device).value, (sample.forward_input.args, sample.forward_input.kwargs))
        return _run(instance.to(device), args, kwargs)

    return program


def _run(module: torch.nn.Module, args: Any, kwargs: Any) -> list[Any]:
    torch.manual_seed(SEED)
    outputs = pytree.tree_leaves(module(*args, **kwargs))
    required = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    sources = [*module.parameters(), *inputs]
    results = [*outputs, *module.buffers()]
    if not required or not sources:
        return results
    seeds = [torch.ones_like(t) for t in required]
    return [*results, *torch.autograd.grad(required, sources, seeds, allow_unused=True)]


def optimizers() -> Iterator[OptimizerInfo]:
    """Return the entries for dense gradients."""
    return (optimizer for optimizer in optim_db if not optimizer.only_supports_sparse_grads)


def check_optimizer(optimizer: OptimizerInfo, *, samples: int | None) -> Verdict:
    """Compare parameters and losses after a few steps, with every implementation in PyTorch."""
    return judge(optimizer.optim_cls.__name__, _optimizer_programs(optimizer, samples), tolerance)


def _optimizer_programs(optimizer: OptimizerInfo, count: int | None) -> Programs:
    implementations = [{}, *({kind: True} for kind in optimizer.supported_impls if kind != "differentiable")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = list(itertools.islice(optimizer.optim_inputs_func("cpu"), count))
    for sample, implementation in itertools.product(inputs, implementations):
        yield f"{sample.desc} {implementation}", _optimizer_program(optimizer, sample, sample.kwargs | implementation)


def _optimizer_program(optimizer: OptimizerInfo, sample: OptimizerInput, options: dict[str, Any]) -> Program:
    del sample

    def program(device: str) -> Any:
        with torch.device("cpu"):
            model = torch.nn.Linear(4, 3, bias=optimizer.optim_cls is not torch.optim.Muon)
            data = torch.randn(6, 4), torch.randn(6, 3)
        on_device = pytree.tree_map(lambda o: o.to(device) if isinstance(o, torch.Tensor) and o.dim() else o, options)
        return _optimize(model.to(device), (data[0].to(device), data[1].to(device)), optimizer, on_device)

    return program


def _optimize(
    model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor], info: OptimizerInfo, options: dict[str, Any]
) -> list[Any]:
    optimizer = info.optim_cls(model.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data[0]) - data[1]).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(STEPS)]
    return [*losses, *model.parameters()]
