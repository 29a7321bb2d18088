"""The executor checks tensors that are not strided, and the ops on them, before a kernel runs."""

from __future__ import annotations

import pytest
import torch

from djinn_core.errors import UnsupportedOperation
from djinn_layouts.execution import layout_call

pytestmark = pytest.mark.filterwarnings("ignore:(The PyTorch API of nested tensors|.*functions that produce)")


def test_invalid_nested_tensor_reaches_no_kernel():
    elements = torch.ones(4)
    for dims, numbers, given in (
        (2, [2, 2, 1000, 1000], elements),
        (2, [-2, -2], elements),
        (0, [], elements),
        (1, [2, 2], elements.reshape(2, 2)),
        (1, [1, 1], torch.ones(4)[::2]),
    ):
        with pytest.raises(RuntimeError, match="a nested tensor"):
            layout_call("aten::to_padded_tensor", ["nested", dims, numbers, given], 0.0)


def test_view_beyond_its_memory_reaches_no_kernel():
    memory = torch.ones(6)
    for dims, numbers, steps, starts in (
        (2, [2, 3], [3, 1], [1]),
        (2, [2, 3], [3, 1000], [0]),
        (2, [2, 3], [-3, 1], [3]),
        (2, [2, 3], [3, 1], [-1]),
        (2, [2, 3], [3, 1], [0, 0]),
        (0, [], [], []),
    ):
        with pytest.raises(RuntimeError, match="nested view"):
            layout_call("aten::clone", ["nested_view", dims, numbers, steps, starts, memory])


def test_invalid_quantized_tensor_reaches_no_kernel():
    integers, scales = torch.zeros(2, 3, dtype=torch.int8), torch.ones(3)
    for described in (
        ["quantized_per_tensor", 0, float("nan"), 0, integers],
        ["quantized_per_tensor", 7, 0.5, 0, integers],
        ["quantized_per_tensor", 1, 0.5, 0, integers],
        ["quantized_per_channel", 0, 5, integers, scales, torch.zeros(3)],
        ["quantized_per_channel", 0, 0, integers, scales, torch.zeros(3)],
    ):
        with pytest.raises(RuntimeError, match="quantized"):
            layout_call("aten::dequantize.self", described)


def test_executor_refuses_sparse_ops_on_quantized_tensors():
    described = ["quantized_per_tensor", 0, 0.5, 0, torch.zeros(2, 3, dtype=torch.int8)]
    with pytest.raises(
        UnsupportedOperation, match="programs may not contain aten::mm for quantized_per_tensor tensors"
    ):
        layout_call("aten::mm", described, described)


def test_layout_call_refuses_other_ops():
    values = torch.ones(2)
    with pytest.raises(UnsupportedOperation, match="aten::from_file"):
        layout_call("aten::from_file", "/etc/passwd")
    with pytest.raises(UnsupportedOperation, match="but has none"):
        layout_call("aten::add.Tensor", values, values)
