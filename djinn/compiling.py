"""For authors of compilers: work in a process of its own, contexts as bytes, PyTorch's libraries, and libraries kept on disk."""

from __future__ import annotations

from djinn_server.compiling.compile_worker import CompileProcess
from djinn_server.compiling.disk_library_cache import DiskLibraryCache
from djinn_server.compiling.packing import pack, unpack
from djinn_server.compiling.torch_libraries import compile_library, load_library, prepare_to_compile

__all__ = [
    "CompileProcess",
    "DiskLibraryCache",
    "compile_library",
    "load_library",
    "pack",
    "prepare_to_compile",
    "unpack",
]
