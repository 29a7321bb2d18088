"""Tests without a GPU; the suite for all compilers where there is one, and torch-tensorrt."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import djinn_compilers.tensorrt
from djinn.errors import UnsupportedOperation
from djinn.hooks import CompilerContext
from djinn.testing import CompilerConformance, PluginConformance
from djinn_compilers.tensorrt.compiler import PACKAGE, TensorRT

HERE = torch.cuda.is_available() and importlib.util.find_spec(PACKAGE) is not None


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_compilers.tensorrt


@pytest.mark.skipif(not HERE, reason="there is no GPU with torch-tensorrt here")
class TestTensorRT(CompilerConformance):
    @pytest.fixture
    def compiler(self):
        return TensorRT()

    @pytest.fixture
    def torch_device(self):
        return torch.device("cuda", 0)


def _context(device, **fields):
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    return CompilerContext(torch.fx.GraphModule({}, graph), (), torch.device(device), **fields)


@pytest.mark.parametrize("fields", [{}, {"writes": (0,)}, {"grows": {0: (1,)}}])
def test_unsupported_programs_are_declined(fields):
    assert TensorRT().compile(_context("cuda:0" if fields else "cpu", **fields)) is None


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is not None, reason="torch-tensorrt is installed")
def test_missing_tensorrt_error_names_package():
    with pytest.raises(UnsupportedOperation, match="pip install torch-tensorrt"):
        TensorRT().compile(_context("cuda:0"))
