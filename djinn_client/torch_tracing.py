"""Private functions of Dynamo that clients need.

`torch_private.missing` lists the functions that the installed PyTorch lacks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import torch
import torch._compile
import torch._refs
import torch.utils._python_dispatch


def spare_dynamo(call_on_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Keep PyTorch from importing `torch._dynamo` at the first meta kernel that is written in Python.

    PyTorch's wrapper, which hides such a kernel from Dynamo, imports Dynamo at its first call and stores the hidden kernel
    in an attribute. This sets the attribute to the kernel itself until the program imports Dynamo. No tracing precedes that import.

    `call_on_import`: calls a function when the program imports a module.
    """
    if "torch._dynamo" in sys.modules:
        return
    kernels = _kernels_hidden_from_dynamo()
    for kernel in kernels:
        setattr(kernel, _UNTRACED, kernel)

    def restore(_: Any) -> None:
        for kernel in kernels:
            if vars(kernel).get(_UNTRACED) is kernel:
                delattr(kernel, _UNTRACED)

    call_on_import("torch._dynamo", restore)


_UNTRACED: Final = "__dynamo_disable"


def _kernels_hidden_from_dynamo() -> list[Any]:
    refs = torch._refs
    modules = refs, refs.linalg, refs.nn.functional, refs.special
    wrappers = [_hidden_from_dynamo(function) for module in modules for function in vars(module).values()]
    return [kernel for kernel in wrappers if kernel is not None]


def _hidden_from_dynamo(function: Any) -> Any:
    """Return the function that `torch._disable_dynamo` wrapped in `function`, perhaps below other wrappers, or None."""
    hiding_code = _hiding_code()
    while (code := getattr(function, "__code__", None)) is not None:
        # Wrappers call their `fn`. Wrappers of one-operand kernels have another function in `__wrapped__`.
        inner = function.__closure__[code.co_freevars.index("fn")].cell_contents if "fn" in code.co_freevars else None
        if code is hiding_code:
            return inner
        function = inner or getattr(function, "__wrapped__", None)
    return None


@functools.cache
def _hiding_code() -> CodeType:
    """Return the code object of the wrappers that `torch._disable_dynamo` creates."""
    code: CodeType = torch._compile._disable_dynamo(_hidden_from_dynamo).__code__
    return code
