"""The operator library of bitsandbytes; what needs bitsandbytes is skipped without it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import djinn_bitsandbytes
from djinn.testing import OperatorLibraryConformance, PluginConformance

with_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_bitsandbytes


def example_calls():
    weight, rows, code = torch.randn(64, 64), torch.randn(1, 64), torch.linspace(-1, 1, 256)
    packed, scale = torch.zeros(2048, 1, dtype=torch.uint8), torch.ones(64)
    whole, bytes_ = torch.ones(4, 8, dtype=torch.int8), torch.zeros(4096, dtype=torch.uint8)
    return {
        "quantize_4bit": (weight, 64, "nf4", torch.uint8),
        "dequantize_4bit": (packed, scale, 64, "nf4", [64, 64], torch.float32),
        "quantize_blockwise": (weight, code, 64),
        "dequantize_blockwise": (bytes_, scale, code, 64, torch.float32),
        "gemv_4bit": (rows, packed, [64, 64], scale, code[:16].contiguous(), 64),
        "int8_vectorwise_quant": (weight.half(), 0.0),
        "int8_vectorwise_dequant": (whole, torch.ones(4)),
        "int8_linear_matmul": (whole, whole),
        "int8_mm_dequant": (torch.ones(4, 4, dtype=torch.int32), torch.ones(4), torch.ones(4)),
        "int8_scaled_mm": (whole, whole, torch.ones(4), torch.ones(4)),
        "gemm_4bit": (rows, packed, [64, 64], scale, 64, "nf4"),
    }


@with_bitsandbytes
class TestLibrary(OperatorLibraryConformance):
    @pytest.fixture
    def library(self):
        return djinn_bitsandbytes.Bitsandbytes()

    @pytest.fixture
    def calls(self, library):
        return {f"bitsandbytes::{name}": [given] for name, given in example_calls().items()}
