"""The private functions of Dynamo, AOTAutograd and inductor that Djinn needs; `torch_private.missing` says which are not there."""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.utils._python_dispatch

F = TypeVar("F", bound=Callable[..., Any])
# Is asked for every op that is called inside it, before it runs.
DispatchMode = torch.utils._python_dispatch.TorchDispatchMode


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


def compile_library(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    grows: Mapping[int, Sequence[int]],
    options: Mapping[str, Any],
) -> bytes:
    """A package with `module` as a native library, for inputs like `inputs`. Takes seconds.

    `grows` has by input the dimensions whose sizes may be others, `options` what is set of inductor beside its defaults.
    """
    auto = torch.export.Dim.AUTO
    sizes = tuple([dict.fromkeys(grows[i], auto) if grows.get(i) else None for i in range(len(inputs))])
    with torch.no_grad():
        exported = torch.export.export(module, tuple(inputs), dynamic_shapes=sizes, strict=False)
    inductor = importlib.import_module("torch._inductor")
    with tempfile.TemporaryDirectory(prefix="djinn-compile-") as folder:
        path = os.fspath(Path(folder) / "template.pt2")
        inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=dict(options))
        return Path(path).read_bytes()


def load_library(package: bytes, device: torch.device) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The function in a package that `compile_library` made. One thread at a time may call it."""
    with tempfile.NamedTemporaryFile(prefix="djinn-compiled-", suffix=".pt2") as file:
        file.write(package)
        file.flush()
        index = device.index if device.type != "cpu" else -1
        # The loader itself: `torch._inductor` takes a second to import, with the interpreter's lock held.
        loader = torch._C._aoti.AOTIModelPackageLoader(file.name, "model", True, 1, index)
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = loader.run
    return run
