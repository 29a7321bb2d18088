"""The compiler `tensorrt`: torch-tensorrt builds an engine from supported ops, and PyTorch runs the other ops."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from djinn.errors import UnsupportedOperation
from djinn.hooks import Compiler, CompilerContext, Replay

PACKAGE = "torch_tensorrt"


class TensorRT(Compiler):
    """Compiler plugin that uses TensorRT, NVIDIA's inference compiler.

    TensorRT has no in-place ops, so templates that write to their inputs are not compiled.
    """

    name = "tensorrt"

    def compile(self, context: CompilerContext) -> Replay | None:
        """Return a compiled graph.

        Return None if the device is not a CUDA device, if sizes vary between runs, or if inputs are written.

        Raises:
            UnsupportedOperation: torch-tensorrt is not installed.
        """
        if context.device.type != "cuda" or context.grows or context.writes:
            return None
        if importlib.util.find_spec(PACKAGE) is None:
            raise UnsupportedOperation(
                "tensorrt needs torch-tensorrt: `pip install torch-tensorrt` in the server's environment, in the version "
                f"for torch {torch.__version__}"
            )
        return _build_engine(importlib.import_module(PACKAGE), context)


def _build_engine(tensorrt: Any, context: CompilerContext) -> Replay:
    inputs = list(context.inputs)
    with torch.no_grad():
        exported_program = torch.export.export(context.graph_module, tuple(inputs), strict=False)
    # Full precision unless the model uses less: results are checked within PyTorch's tolerances.
    module = tensorrt.dynamo.compile(exported_program, inputs=inputs, disable_tf32=True, use_explicit_typing=True)

    def replay(inputs_of_run: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        results = module(*[tensor.contiguous() for tensor in inputs_of_run])
        return list(results) if isinstance(results, (list, tuple)) else [results]

    return replay
