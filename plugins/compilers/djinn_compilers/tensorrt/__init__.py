"""Compile hot templates with TensorRT, if torch-tensorrt is installed."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Compiler, hookimpl
from djinn_compilers.tensorrt.compiler import TensorRT

djinn_api_version = "2.0"


@hookimpl
def djinn_register_compilers() -> Iterable[Compiler]:
    """Return the compiler `tensorrt`."""
    return [TensorRT()]
