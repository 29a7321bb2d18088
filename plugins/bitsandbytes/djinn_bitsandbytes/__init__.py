"""Operator library of bitsandbytes: weights in 4 and 8 bits, and products with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from djinn.hooks import OperatorLibrary, hookimpl

djinn_api_version = "2.0"

_OPS: Final = (
    "dequantize_4bit dequantize_blockwise gemm_4bit gemv_4bit int8_linear_matmul int8_mm_dequant int8_scaled_mm int8_vectorwise_dequant "
    "int8_vectorwise_quant quantize_4bit quantize_blockwise"
)


class Bitsandbytes(OperatorLibrary):
    """The ops of bitsandbytes: quantization, and products with quantized weights.

    The kernels take pointers and check few of their arguments, so only named tenants may use them.
    """

    name = "bitsandbytes"
    module = "bitsandbytes"
    package = (
        "bitsandbytes and djinn-bitsandbytes (`pip install ./plugins/bitsandbytes` in a checkout of Djinn, or "
        "`pip install FOLDER/djinn_bitsandbytes-*.whl` from a FOLDER of its wheels)"
    )
    operators = frozenset(f"bitsandbytes::{name}" for name in _OPS.split())
    every_tenant = False


@hookimpl
def djinn_register_operators() -> Iterable[OperatorLibrary]:
    """Return the operator library of bitsandbytes."""
    return [Bitsandbytes()]
