"""The package offers the op handler `layouts`. It is imported at the first tensor of such a layout."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import djinn
from djinn.testing import OperatorLibraryConformance, OpHandlerConformance, PluginConformance
from djinn_client.interception.recording.recorder import current
from djinn_layouts import op_handler, operator_library

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested"
)


class TestPlugin(PluginConformance):
    @pytest.fixture(params=[op_handler, operator_library], ids=["client", "executor"])
    def plugin(self, request):
        return request.param


class TestOpHandler(OpHandlerConformance):
    @pytest.fixture
    def op_handler(self):
        return op_handler.Layouts()


class TestLibrary(OperatorLibraryConformance):
    @pytest.fixture
    def library(self):
        return operator_library.LayoutCalls()

    @pytest.fixture
    def calls(self):
        return {}


LAZY = """
import sys
import djinn, torch

djinn.configure(executor="inline")
dense = torch.eye(3, device="remote_accelerator")
(dense @ dense + 1).cpu(), torch.nn.functional.embedding_bag(torch.zeros(1, 2, dtype=torch.int64).to(dense.device), dense).sum().item()
before = {name for name in sys.modules if name.startswith("djinn_layouts")}
assert before <= {"djinn_layouts", "djinn_layouts.op_handler", "djinn_layouts.operator_library"}, before
assert dense.to_sparse().to_dense().equal(dense)
assert "djinn_layouts.sparse" in sys.modules
"""


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.eye(3, device=device).to_sparse(),
        lambda device: torch.eye(3).to_sparse().to(device),
        lambda device: torch.eye(3).to_sparse_csr().to(device),
        lambda device: torch.zeros(3, 3, layout=torch.sparse_coo, device=device),
        lambda device: torch.sparse_coo_tensor(torch.zeros(1, 1), torch.ones(1), (3,), device=device),
        lambda device: torch.quantize_per_tensor(torch.ones(3, device=device), 1.0, 0, torch.qint8),
        lambda device: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8).to(device),
        lambda device: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device),
        lambda device: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to(device),
    ],
)
def test_missing_package_error_names_package(embedded, make, monkeypatch):
    monkeypatch.setattr(op_handler.Layouts, "name", "another")
    with pytest.raises(djinn.errors.DjinnError, match=r"pip install \./plugins/layouts"):
        make(embedded)
    monkeypatch.undo()
    assert make(embedded).device.type == "remote_accelerator"


def test_program_without_layouts_does_not_import_package(plain_environment):
    done = subprocess.run(
        [sys.executable, "-c", LAZY], env=plain_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_layout_ops_are_recorded_at_user_line(embedded):
    sparse = torch.eye(3, device=embedded).to_sparse()
    sparse.clone()
    code, _ = current().entries.sites[-1]
    assert code.co_filename == __file__
