"""For authors of compilers: work in a process of its own, contexts as bytes, PyTorch's libraries, and libraries kept on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import importing

# Of the server, which a machine of a client need not have.
if TYPE_CHECKING:
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

_PLACES = {
    "djinn_server.compiling.compile_worker": "CompileProcess",
    "djinn_server.compiling.disk_library_cache": "DiskLibraryCache",
    "djinn_server.compiling.packing": "pack unpack",
    "djinn_server.compiling.torch_libraries": "compile_library load_library prepare_to_compile",
}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _PLACES)
