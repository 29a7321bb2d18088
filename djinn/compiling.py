"""For authors of compilers: work in a process of its own, contexts as bytes, and PyTorch's libraries compiled ahead of time."""

from __future__ import annotations

from djinn_core.server.compiling.compile_worker import run_apart
from djinn_core.server.compiling.packing import pack, unpack
from djinn_core.torch_tracing import compile_library, load_library

__all__ = ["compile_library", "load_library", "pack", "run_apart", "unpack"]
