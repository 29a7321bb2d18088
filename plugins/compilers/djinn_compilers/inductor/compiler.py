"""The compiler `inductor`: a separate process compiles a graph, and the executor loads the library and stores it on disk.

Inductor is Python code and takes seconds. In the executor's process it would hold Python's global lock, which sessions
need. The library runs without Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from djinn.errors import UnsupportedOperation
from djinn.hooks import CompileProcess, Compiler, CompilerContext, Replay, pack, unpack
from djinn_compilers.inductor.disk_library_cache import DiskLibraryCache
from djinn_compilers.inductor.toolchain import missing_toolchain, quick_linker
from djinn_compilers.inductor.torch_libraries import compile_library, load_library, prepare_to_compile

PACKAGE: Final = f"{__name__}:package"
PREPARE: Final = f"{__name__}:prepare"
MAX_SECONDS: Final = 900.0  # seconds for one template at most, at low priority


class Inductor(Compiler):
    """Compiler plugin that uses PyTorch's inductor, ahead of time (AOTInductor)."""

    name = "inductor"

    def __init__(self, process: CompileProcess | None = None) -> None:
        self._process = process or CompileProcess()
        self._disk_cache = DiskLibraryCache("inductor 2")

    def prepare(self) -> None:
        """Start the compiler process, and make it import inductor.

        Do nothing if the disk cache has libraries of earlier processes, because no compilation may be necessary.
        """
        if self._disk_cache.is_empty() and not missing_toolchain():
            self._process.call(PREPARE, b"", MAX_SECONDS)

    def compile(self, context: CompilerContext) -> Replay | None:
        """Return a function that runs the graph as native code.

        Raises:
            UnsupportedOperation: this machine has no C++ compiler, or inductor cannot compile the graph.
        """
        packed_graph = pack(context)
        library = self._disk_cache.get(packed_graph) or self._compile_and_store(packed_graph)
        run = load_library(library, context.device)

        def replay(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return run(list(inputs))

        return replay

    def _compile_and_store(self, packed_graph: bytes) -> bytes:
        if problem := missing_toolchain():
            raise UnsupportedOperation(problem)
        library = self._process.call(PACKAGE, packed_graph, MAX_SECONDS)
        self._disk_cache.put(packed_graph, library)
        return library


def prepare(_: bytes) -> bytes:
    """Import the libraries that `package` needs. Runs in a separate process."""
    prepare_to_compile()
    return b""


def package(packed: bytes) -> bytes:
    """Compile a packed graph to a library. Runs in a separate process."""
    context = unpack(packed)
    torch.set_num_threads(context.threads)  # loops are compiled for this number of threads
    # Inductor would first ask a Python that imports PyTorch whether the processor's vectors work: what is made here is tried here.
    options = {"compile_threads": 1, "cpp.vec_isa_ok": True}
    try:
        with quick_linker():
            return compile_library(context, options)
    except Exception:  # one of the C++ compiler, if it does not know these vectors or cannot use that linker
        return compile_library(context, {"compile_threads": 1})
