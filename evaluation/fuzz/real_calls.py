"""Calls of ops in PyTorch's operator database, including backward passes."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Call = tuple[tuple[Any, ...], dict[str, Any]]
LARGEST = 4096  # maximum elements of a kept tensor


class Calls(TorchDispatchMode):
    """Dispatch mode that records up to `each` calls of each overload, with copies of their tensors."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self.kept: dict[str, list[Call]] = {}
        self._each = each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        examples = self.kept.setdefault(func.name() if "." in func.name() else str(func.name()), [])
        if len(examples) < self._each:
            with contextlib.suppress(_TooLargeError):
                examples.append(tree_map(_copy, (args, kwargs or {})))
        return func(*args, **(kwargs or {}))


class _TooLargeError(Exception):
    pass


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) not in {torch.Tensor, torch.nn.Parameter} or value.layout != torch.strided or value.is_quantized:
        raise _TooLargeError
    if value.untyped_storage().nbytes() > LARGEST * 16 or value.device.type != "cpu" or value.is_conj():
        raise _TooLargeError
    storage = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())


def database_calls(each: int = 8, samples: int = 4) -> dict[str, list[Call]]:
    """Return up to `each` calls of each overload that the first `samples` samples of database entries reach."""
    from torch.testing._internal.common_methods_invocations import op_db

    mode = Calls(each)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            for dtype in (torch.float32, torch.int64):
                if dtype in info.dtypes:
                    _run(info, dtype, samples, mode)
    return mode.kept


def _run(info: Any, dtype: torch.dtype, samples: int, mode: Calls) -> None:
    differentiable = dtype.is_floating_point and info.supports_autograd
    with contextlib.suppress(Exception):  # results do not matter
        for i, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=differentiable)):
            if i >= samples:
                break
            with contextlib.suppress(Exception), mode:
                result = info.op(sample.input, *sample.args, **sample.kwargs)
                if differentiable and isinstance(result, torch.Tensor) and result.requires_grad:
                    result.sum().backward()
