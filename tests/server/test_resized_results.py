"""Ops that resize their result, whose memory is not PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from djinn_core.ir.form import Form, Operand
from djinn_core.ir.handles import make_handle
from djinn_core.wire.messages import Template
from djinn_server.running.run import run_template
from djinn_server.running.run_request import RunRequest
from djinn_server.running.template_compiler import compile_template
from djinn_server.running.values import ValueTable

CPU = torch.device("cpu")
NEG = Form("aten::neg.out", (Operand(),), (("out", Operand()),), (), False)


@pytest.mark.parametrize("present", [0, 8])
def test_result_in_borrowed_memory_is_resized(present):
    """The view of an empty result shares its memory, though both have no address."""
    held, values = torch.ones(2), ValueTable()
    address = held.data_ptr() if present else 0
    storage = torch._C._construct_storage_from_data_pointer(address, CPU, present)
    source, out, view = make_handle(1, 1), make_handle(2, 1), make_handle(2, 2)
    values[source] = torch.arange(3.0)
    for handle in (out, view):
        values[handle] = torch.empty(0).set_(storage, 0, (present // 4,), (1,))
    template = compile_template(Template((NEG,), (0,), (0, 1), (0, 1), ()), CPU, {})
    with torch.inference_mode():
        run = run_template(template, RunRequest(1, [], [], [], [], (), False, [source, out]), [], values)
    assert not run.failures
    assert values[out].tolist() == [0, -1, -2]
    assert values[view].untyped_storage().data_ptr() == values[out].untyped_storage().data_ptr() != address
