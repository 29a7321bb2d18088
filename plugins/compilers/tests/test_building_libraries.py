"""Building of compiled libraries: the order and the concurrency of their C++ files. With stand-ins for inductor's builders."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import attrs
import pytest

from djinn_compilers.inductor import torch_libraries

NEXT = 5.0  # seconds that one file waits for the other


@attrs.frozen
class File:
    path: str

    def get_target_file_path(self):
        return self.path


@pytest.fixture
def built(monkeypatch):
    """Paths in the order in which they were built; files that end with `.o` wait for each other."""
    order, both = [], threading.Barrier(2)

    def build(_lock, files):
        for file in files:
            if file.path.endswith(".o"):
                both.wait(NEXT)
            order.append(file.path)

    module = SimpleNamespace(_worker_compile_cpp=build)
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", module)
    with torch_libraries._both_files_at_once():
        module._worker_compile_cpp("w", [File("wrapper.gch")])
        module._worker_compile_cpp("k", [File("kernels.gch")])
        module._worker_compile_cpp("l", [File("wrapper.o"), File("kernels.o"), File("library.so")])
    assert module._worker_compile_cpp is build
    return order


def test_files_are_compiled_concurrently_then_linked(built):
    headers, sources, linked = set(built[:2]), set(built[2:4]), built[4:]
    assert headers == {"wrapper.gch", "kernels.gch"}
    assert sources == {"wrapper.o", "kernels.o"}
    assert linked == ["library.so"]
