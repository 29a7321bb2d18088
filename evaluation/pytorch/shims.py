"""Shims for names and class hierarchies that test files of PyTorch 2.6 need and later versions lack."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_INTERNAL = "torch.testing._internal"


def _once(*_: Any, **__: Any) -> Any:
    """Return a decorator that runs a test once. PyTorch 2.6 repeated the test in a precision that few CPUs have."""
    return lambda test: test


def _is_gone(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("this version of PyTorch lacks a name that the test needs")


def _binary_ufuncs_and_refs() -> tuple[Any, ...]:
    from torch.testing._internal import common_methods_invocations as database

    return tuple(op for op in database.op_db + database.python_ref_db if isinstance(op, database.BinaryUfuncInfo))


def _of_device_types(name: str) -> Any:
    return getattr(importlib.import_module(f"{_INTERNAL}.common_device_type"), name)


def _skip_ops(*given: Any) -> Any:
    """Call `skipOps` with the ops only. Formerly, it took the names of a class and a test before the ops."""
    return _of_device_types("skipOps")(given[-1])


# functions that make the shim, by module and name
_SHIMS: dict[tuple[str, str], Callable[[], Any]] = {
    (f"{_INTERNAL}.common_mkldnn", "bf32_on_and_off"): lambda: _once,
    (f"{_INTERNAL}.common_cuda", "tf32_is_not_fp32"): lambda: lambda: False,
    (f"{_INTERNAL}.common_nn", "new_module_tests"): list,  # tests that are not device-generic
    (f"{_INTERNAL}.common_methods_invocations", "binary_ufuncs_and_refs"): _binary_ufuncs_and_refs,
    (f"{_INTERNAL}.common_methods_invocations", "skip"): lambda: _of_device_types("skip"),
    (f"{_INTERNAL}.common_methods_invocations", "xfail"): lambda: _of_device_types("xfail"),
    (f"{_INTERNAL}.common_methods_invocations", "skipOps"): lambda: _skip_ops,
    ("torch.nn.attention.flex_attention", "create_nested_block_mask"): lambda: _is_gone,
}


def put_in_place(source: str) -> None:
    """Add shims to PyTorch's modules for missing names in the text of a test file."""
    for (module, name), make in _SHIMS.items():
        if name in source and not hasattr(importlib.import_module(module), name):
            setattr(importlib.import_module(module), name, make())


def as_now(source: str) -> str:
    """Return a test file's text with `super()` for `super(self.__class__, self)`, which fails in derived classes.

    PyTorch's device classes now derive from the classes of a test file. In 2.6 they did not.
    """
    return source.replace("super(self.__class__, self)", "super()")
