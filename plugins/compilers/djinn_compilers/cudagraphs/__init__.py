"""Replays hot templates as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Compiler, hookimpl
from djinn_compilers.cudagraphs.compiler import CudaGraphs

djinn_api_version = "2.0"


@hookimpl
def djinn_register_compilers() -> Iterable[Compiler]:
    """Register the compiler `cudagraphs`."""
    return [CudaGraphs()]
