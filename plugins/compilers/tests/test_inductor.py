"""The compiler, in a process of its own as on a server. A library takes seconds, so most of its suite runs on request only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import djinn_compilers.inductor
from djinn.errors import UnsupportedOperation
from djinn.hooks import CompileProcess, CompilerContext
from djinn.testing import CompilerConformance, PluginConformance
from djinn_compilers.inductor import compiler as module
from djinn_compilers.inductor.compiler import Inductor
from djinn_compilers.inductor.toolchain import missing_toolchain, quick_linker

REQUESTED = "TEST_INDUCTOR" in os.environ
ALWAYS = {"test_compiler_has_every_member", "test_growing_sizes_are_supported"}


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_compilers.inductor


@pytest.fixture(scope="module")
def process():
    process = CompileProcess(nice=0)  # behind other processes of a busy machine it would take minutes
    yield process
    process.close()


@pytest.mark.skipif(bool(missing_toolchain()), reason=missing_toolchain())
class TestInductor(CompilerConformance):
    @pytest.fixture
    def compiler(self, request, process, monkeypatch):
        if not REQUESTED:
            if request.node.originalname not in ALWAYS:
                pytest.skip("takes seconds: set TEST_INDUCTOR=1")
            monkeypatch.syspath_prepend(str(Path(__file__).parent))
            monkeypatch.setattr(module, "PACKAGE", "one_library:package")
        return Inductor(process)

    def test_inductor_supports_growing_sizes(self, compiler, torch_device, monkeypatch):
        super().test_growing_sizes_are_supported(compiler, torch_device)
        monkeypatch.setattr(CompileProcess, "call", lambda *_: pytest.fail("it is compiled a second time"))
        super().test_growing_sizes_are_supported(Inductor(), torch_device)


def test_missing_toolchain_error_names_package(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(UnsupportedOperation, match="apt-get install"):
        Inductor().compile(CompilerContext(torch.fx.GraphModule({}, graph), (), torch.device("cpu")))


def test_first_fast_linker_is_used_in_block(monkeypatch, tmp_path):
    for name in ("ld.gold", "ld.lld"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("COMPILER_PATH", raising=False)
    with quick_linker():
        linker = Path(os.environ["COMPILER_PATH"]) / "ld"
        assert linker.resolve() == (tmp_path / "ld.lld").resolve()
    assert "COMPILER_PATH" not in os.environ
    assert not linker.is_symlink()


def test_default_linker_without_alternative(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("COMPILER_PATH", raising=False)
    with quick_linker():
        assert "COMPILER_PATH" not in os.environ
