"""Upper bounds of what a template writes, and of what its results share with its inputs."""

from __future__ import annotations

import pytest
import torch

from djinn_core.ir.operators import LAYOUT_CALL
from djinn_core.wire.messages import Template
from djinn_server.running.compiled_step import CompiledStep
from djinn_server.running.input_aliases import aliases_of
from djinn_server.running.template_compiler import CompiledTemplate

_EMPTY = Template((), (), (), (), ())


def step(op, reads, makes, writes=()):
    def run():
        raise AssertionError("nothing is run")

    made = tuple(enumerate(makes))
    return CompiledStep(op, run, (), (), reads, made, len(made) > 1, writes, (), moves=False, plain=True)


def template(*steps, inputs=2, outputs=()):
    return CompiledTemplate(_EMPTY, steps, (), 0, inputs, 8, outputs, (), random=False, moves=False)


@pytest.mark.parametrize(
    ("steps", "written", "shared"),
    [
        ([step("aten::add.Tensor", (0, 1), (2,))], (), {}),
        ([step("aten::add_.Tensor", (0, 1), (2,), (0,))], (0,), {2: {0, 1}}),
        ([step("aten::view", (1,), (2,)), step("aten::relu_", (2,), (3,), (2,))], (1,), {2: {1}, 3: {1}}),
        ([step("aten::split.Tensor", (0,), (2, 3)), step("aten::zero_", (3,), (4,), (3,))], (0,), {2: {0}, 3: {0}}),
        ([step("aten::linear", (0, 1), (2,)), step("aten::relu_", (2,), (3,), (2,))], (), {}),
        # Composite, and returns what it is given in evaluation: its schema does not say so.
        ([step("aten::dropout", (0,), (2,)), step("aten::relu_", (2,), (3,), (2,))], (0,), {2: {0}}),
        ([step(LAYOUT_CALL, (0, 1), (2,))], (0, 1), {2: {0, 1}}),
        # No schema says that these write running statistics, or return views of what they are given.
        ([step("aten::native_batch_norm", (2, 0, 1), (3, 4, 5))], (0, 1), {}),
        ([step("aten::batch_norm_update_stats", (2, 0, 1), (3, 4))], (0, 1), {}),
        ([step("aten::_unsafe_view", (0,), (2,)), step("aten::relu_", (2,), (3,), (2,))], (0,), {2: {0}, 3: {0}}),
        ([step("aten::lift", (0,), (2,))], (), {2: {0}}),
        # The first input lies in the memory of the second afterwards, and is written by later templates.
        ([step("aten::set_.source_Tensor", (0, 1), (2,), (0,))], (0, 1), {2: {0, 1}}),
    ],
)
def test_alias_analysis_bounds_written_inputs(steps, written, shared):
    found = aliases_of(template(*steps, outputs=tuple(range(2, 5))), {LAYOUT_CALL})
    assert found.written_inputs == written
    outputs = dict(found.outputs)
    for place, inputs in shared.items():
        assert outputs[place - 2] >= inputs
    assert all(place + 2 in {n for one in steps for _, n in one.makes} for place in outputs)


def test_undecomposed_ops_return_own_memory():
    """These composite ops are exceptions: none returns its operand."""
    matrix, image = torch.randn(4, 4), torch.randn(1, 4, 4)
    functions = [
        lambda: torch.nn.functional.linear(matrix, torch.eye(4)),
        lambda: torch.matmul(matrix, torch.eye(4)),
        lambda: torch.nn.functional.layer_norm(matrix, (4,)),
        lambda: torch.nn.functional.rms_norm(matrix, (4,)),
        lambda: torch.batch_norm(matrix, None, None, torch.zeros(4), torch.ones(4), False, 0.1, 0.0, True),
        lambda: torch.gru(image, torch.zeros(1, 1, 4), [torch.zeros(12, 4)] * 2, False, 1, 0.0, False, False, True)[0],
        lambda: torch.nn.functional.scaled_dot_product_attention(image, image, image),
    ]
    for function in functions:
        result = function()
        assert result.untyped_storage().data_ptr() not in {
            matrix.untyped_storage().data_ptr(),
            image.untyped_storage().data_ptr(),
        }
