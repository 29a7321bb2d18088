"""The private functions of Dynamo, AOTAutograd and DTensor that clients need; `torch_private.missing` says which are not there.

PyTorch imports some of them, for a second, where it only has to ask whether they are in use: `spare_dtensor` and `spare_dynamo`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, Final, TypeVar

import torch
import torch._compile
import torch._refs
import torch.utils._python_dispatch

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


_DTENSOR_MODULE: Final = "torch.distributed.tensor"


class _DTensorKind(type):
    """Class of the stand-in for `DTensor`: nothing is an instance until the module is imported, then what is one of the real class.

    C++ asks at each op on a tensor subclass, so `__instancecheck__` is a function of C throughout: `count` of an empty tuple is 0.
    """

    spared: type | None = None
    __instancecheck__ = ().count  # type: ignore[assignment]

    def __getattr__(cls, name: str) -> Any:
        return getattr(sys.modules[_DTENSOR_MODULE].DTensor, name)


class _StandInModule(ModuleType):
    """Module with the stand-in for `DTensor`; other threads, which import it meanwhile, wait and find what the real one has.

    Attributes:
        over: set when it is no longer among the modules.
    """

    def __init__(self, stand_in: type) -> None:
        super().__init__(_DTENSOR_MODULE)
        self.over = threading.Event()
        self._stand_in, self._thread = stand_in, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() != self._thread:
            self.over.wait()
            return getattr(importlib.import_module(_DTENSOR_MODULE), name)
        if name == "DTensor":
            return self._stand_in
        raise AttributeError(name)


def spare_dtensor(call_on_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Keep PyTorch from importing `torch.distributed.tensor`, and sympy with it, only to ask at an op whether a tensor is a DTensor.

    It looks the class up once, at the first op on a tensor subclass, and finds a stand-in here. `call_on_import` has a function called
    with a module when the program imports it: DTensors are recognised from then on.
    """
    if not torch.distributed.is_available() or _DTENSOR_MODULE in sys.modules or _DTensorKind.spared is not None:
        return
    stand_in = _DTensorKind("DTensor", (), {})
    module = _StandInModule(stand_in)
    sys.modules[_DTENSOR_MODULE] = module
    try:
        torch.ops.aten._assert_async.default(_RuleProbe._make_wrapper_subclass(_RuleProbe, (1,)))
    except AttributeError:  # of the real one, which another thread has half imported: PyTorch asks again at the next op
        if sys.modules.get(_DTENSOR_MODULE) is module:
            raise
    finally:
        if sys.modules.get(_DTENSOR_MODULE) is module:
            del sys.modules[_DTENSOR_MODULE]
        module.over.set()

    def come(real: Any) -> None:
        _DTensorKind.__instancecheck__ = type.__instancecheck__.__get__(real.DTensor)  # type: ignore[method-assign]

    call_on_import(_DTENSOR_MODULE, come)
    _DTensorKind.spared = stand_in


def spare_dynamo(call_on_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Keep PyTorch from importing `torch._dynamo` at the first meta kernel that is written in Python.

    Such kernels are wrapped so that dynamo does not trace them; as long as it is not imported, nothing traces, and they are called as
    they are. PyTorch keeps what it calls in an attribute of the kernel.
    """
    if "torch._dynamo" in sys.modules:
        return
    kernels = _kernels_hidden_from_dynamo()
    for kernel in kernels:
        setattr(kernel, _UNTRACED, kernel)

    def come(_: Any) -> None:
        for kernel in kernels:
            if vars(kernel).get(_UNTRACED) is kernel:
                delattr(kernel, _UNTRACED)

    call_on_import("torch._dynamo", come)


_UNTRACED: Final = "__dynamo_disable"


def _kernels_hidden_from_dynamo() -> list[Any]:
    refs = torch._refs
    modules = refs, refs.linalg, refs.nn.functional, refs.special
    found = [_hidden_from_dynamo(function) for module in modules for function in vars(module).values()]
    return [kernel for kernel in found if kernel is not None]


def _hidden_from_dynamo(function: Any) -> Any:
    """The function that `torch._disable_dynamo` was given where it made `function`, or one that `function` wraps; else None."""
    hides = _hiding_code()
    while (code := getattr(function, "__code__", None)) is not None:
        # Wrappers call their `fn`; those of one operand say in `__wrapped__` that they wrap something else.
        inner = function.__closure__[code.co_freevars.index("fn")].cell_contents if "fn" in code.co_freevars else None
        if code is hides:
            return inner
        function = inner or getattr(function, "__wrapped__", None)
    return None


@functools.cache
def _hiding_code() -> CodeType:
    """The code of each function that `torch._disable_dynamo` makes."""
    code: CodeType = torch._compile._disable_dynamo(_hidden_from_dynamo).__code__
    return code


class _RuleProbe(torch.Tensor):
    """A tensor subclass on which an op does nothing."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> None:
        """Do nothing."""
