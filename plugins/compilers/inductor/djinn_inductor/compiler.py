"""The compiler: has a process of its own compile a graph ahead of time, and loads the library that comes out.

Inductor is Python and takes seconds: in the executor's process it would hold the interpreter's lock that sessions need. The
library runs without Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from djinn.compiling import compile_library, load_library, pack, run_apart, unpack
from djinn.hooks import CompilerContext, Replay, UnsupportedOperation
from djinn_inductor.toolchain import missing_toolchain

LONGEST_SECONDS: Final = 900.0  # that one template may take, at a low priority


class Inductor:
    """PyTorch's inductor, ahead of time."""

    name = "inductor"

    def compile(self, context: CompilerContext) -> Replay | None:
        """The graph as a native library.

        Raises:
            UnsupportedOperation: there is no C++ compiler here, or inductor cannot compile the graph.
        """
        if problem := missing_toolchain():
            raise UnsupportedOperation(problem)
        package = run_apart(f"{__name__}:package", pack(context), LONGEST_SECONDS)
        run = load_library(package, context.device)

        def replay(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return run(list(inputs))

        return replay


def package(packed: bytes) -> bytes:
    """A package of what was packed. Runs in a process of its own."""
    context = unpack(packed)
    torch.set_num_threads(context.threads)  # loops are written for this number
    return compile_library(context.graph_module, context.inputs, context.grows, {"compile_threads": 1})
