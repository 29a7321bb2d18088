"""The private functions of Dynamo and AOTAutograd that Djinn needs; `torch_private.missing` says which are not there."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def trace_as_plain(cls: type[torch.Tensor], wanted: Callable[[Any], bool]) -> None:
    """Have Dynamo trace tensors of `cls` as plain ones, where `wanted` says so of what compiles (see `backend_of`).

    By itself it takes tensors of a class with a `__torch_dispatch__` for objects that it knows nothing of.
    """
    builder = importlib.import_module("torch._dynamo.variables.builder").VariableBuilder
    wrap = builder._wrap

    @functools.wraps(wrap)
    def wrap_plain(self: Any, value: Any) -> Any:
        if type(value) is cls and wanted(self.tx.output.compiler_fn):
            return self.wrap_tensor(value)
        return wrap(self, value)

    builder._wrap = wrap_plain


def backend_of(compiler: Any) -> Any:
    """The backend that the user asked for, behind the wrappers that PyTorch puts around it."""
    while inner := getattr(compiler, "_torchdynamo_orig_backend", None) or getattr(compiler, "__wrapped__", None):
        compiler = inner
    return getattr(compiler, "compiler_fn", compiler)


def takes_list(function: F) -> F:
    """Tell AOTAutograd that `function` takes its inputs as one list, which it may empty to free them early."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
