"""Building of compiled libraries, with stand-ins for inductor's builders: order and concurrency of C++ files, and example inputs."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from djinn.hooks import CompilerContext
from djinn_compilers.inductor import torch_libraries
from djinn_core.ir.values import meta_of

NEXT = 5.0  # seconds that one file waits for the other


@attrs.frozen
class File:
    path: str

    def get_target_file_path(self):
        return self.path


@pytest.fixture
def build_order(monkeypatch):
    """Return paths in build order. Files that end with `.o` wait for each other."""
    order, both = [], threading.Barrier(2)

    def build(_lock, files):
        for file in files:
            if file.path.endswith(".o"):
                both.wait(NEXT)
            order.append(file.path)

    module = SimpleNamespace(_worker_compile_cpp=build)
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", module)
    with torch_libraries._compile_files_in_parallel():
        module._worker_compile_cpp("w", [File("wrapper.gch")])
        module._worker_compile_cpp("k", [File("kernels.gch")])
        module._worker_compile_cpp("l", [File("wrapper.o"), File("kernels.o"), File("library.so")])
    assert module._worker_compile_cpp is build
    return order


def test_files_are_compiled_concurrently_then_linked(build_order):
    headers, sources, linked = set(build_order[:2]), set(build_order[2:4]), build_order[4:]
    assert headers == {"wrapper.gch", "kernels.gch"}
    assert sources == {"wrapper.o", "kernels.o"}
    assert linked == ["library.so"]


def test_worker_allocates_no_gpu_memory_for_example_inputs(monkeypatch):
    given = []
    monkeypatch.setattr(
        torch_libraries, "_compile_package", lambda _, inputs, *others: given.extend(inputs) or b"library"
    )
    meta = meta_of(torch.empty(3, 4).t())
    context = CompilerContext(torch.fx.GraphModule({}, torch.fx.Graph()), (meta,), torch.device("cuda:0"))
    assert torch_libraries.compile_library(context, {}) == b"library"
    (example,) = given
    assert isinstance(example, FakeTensor)
    assert (example.shape, example.stride(), example.device) == ((4, 3), (1, 4), torch.device("cuda:0"))
