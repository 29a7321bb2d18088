"""The compiler, in a process of its own as on a server. A library takes seconds, so most of its suite runs on request only."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

import djinn_inductor
from djinn.compiling import run_apart
from djinn.hooks import CompilerContext, UnsupportedOperation
from djinn.testing import CompilerConformance, PluginConformance
from djinn_inductor import compiler
from djinn_inductor.compiler import Inductor
from djinn_inductor.toolchain import missing_toolchain

REQUESTED = "TEST_INDUCTOR" in os.environ


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_inductor


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_toolchain()), reason=missing_toolchain())
class TestInductor(CompilerConformance):
    @pytest.fixture
    def compiler(self):
        return Inductor()

    @pytest.fixture(autouse=True)
    def _one_unless_requested(self, request, monkeypatch):
        if not REQUESTED and request.node.originalname not in {"test_it_is_a_compiler", "test_sizes_that_grow"}:
            pytest.skip("takes seconds: set TEST_INDUCTOR=1")
        # Behind other processes of a busy machine it would take minutes.
        apart = partial(run_apart, nice=0)
        if not REQUESTED:  # optimizing the C++ around the kernels takes a third of the time
            monkeypatch.setenv("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
            monkeypatch.syspath_prepend(str(Path(__file__).parent))
            apart = lambda function, data, seconds: run_apart("one_library:package", data, seconds, nice=0)
        monkeypatch.setattr(compiler, "run_apart", apart)


def test_without_a_toolchain_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(UnsupportedOperation, match="apt-get install"):
        Inductor().compile(CompilerContext(torch.fx.GraphModule({}, graph), (), torch.device("cpu")))
