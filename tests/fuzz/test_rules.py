"""Calls that crashed the process, or never returned, are refused before a kernel sees them; their like that is right is not."""

from __future__ import annotations

import pytest
import torch

from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.form import Constant, Enumerated, Form, ListArg, Operand, SelfDevice, SlotArg
from djinn_core.ir.operators import resolve
from djinn_server.checks.kinds import check_kinds
from djinn_server.checks.rules import checked

F = torch.rand
LEAST = -(2**63)


def ints(*values):
    return torch.tensor(values)


# Name, arguments of a call that PyTorch survives, arguments of one that it does not.
CALLS = {
    "_adaptive_avg_pool2d_backward": ((F(2, 3, 1, 1), F(2, 3, 4, 4)), (F(8, 5, 7), F(7, 8, 8))),
    "_cdist_backward": ((F(4, 5), F(4, 2), F(5, 2), 1.0, F(4, 5)), (F(5, 5), F(5, 7), F(5, 5), 1.0, F(2, 5, 5))),
    "_cholesky_solve_helper": ((F(3, 1), torch.eye(3), False), (F(3, 2), F(2, 2, 3, 3, 3), False)),
    "_ctc_loss": ((F(5, 1, 3), ints([1, 2]), [5], [2]), (F(5, 1, 3), ints([1, 999_999]), [5], [2])),
    "_embedding_bag_dense_backward": (
        (F(1, 3), ints(0, 1), ints(0, 0), ints(2), ints(0), 4, False, 0, None),
        (F(1, 3), ints(0, 1), ints(0, 9), ints(2), ints(0), 4, False, 0, None),
    ),
    "_embedding_bag": ((F(4, 3), ints(0, 3), ints(0, 1)), (F(2, 3), ints(3, 0).view(2, 1), ints(3, 0).view(2, 1))),
    "_fft_r2c": ((F(4, 4), [1], 0, True), (F(4, 4), [-2147483649], 0, True)),
    "_fused_sgd_": (
        ([F(3)], [F(3)], []),
        ([F(3), F(2)], [F(3)], []),
    ),
    "_log_softmax_backward_data": ((F(2, 3), F(2, 3), 1, torch.float32), (F(2, 4), F(2, 3), 1, torch.float32)),
    "_pdist_backward": ((F(1), F(2, 3), 2.0, F(1)), (F(1), F(5, 1), 2.0, F(10))),
    "_reshape_alias": ((F(6), [2, 3], [3, 1]), (F(6), [2, 3], [1000, 1])),
    "_unsafe_masked_index": (
        (F(0, 0), torch.ones(2, 2, dtype=torch.bool), [ints([0, 1]), ints([1, 0])], 2),
        (F(0, 0), torch.ones(2, 2, dtype=torch.bool), [ints([0, 1]), ints([1, 0])] * 2, 2),
    ),
    "_upsample_bilinear2d_aa": (
        (F(1, 3, 10, 20), [8, 10], False, 0.8, 0.5),
        (F(1, 3, 10, 20), [8, 21], False, 0.8, 1.0),
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        (F(1, 2, 3, 4), F(1, 2, 5, 4), F(1, 2, 5, 4)),
        (F(1, 2, 3, 4), F(1, 2, 0, 4), F(1, 2, 0, 4)),
    ),
    "scaled_dot_product_attention": (
        (F(1, 2, 3, 4), F(1, 2, 5, 4), F(1, 2, 5, 4)),
        (F(1, 2, 3, 4), F(1, 2, 5, 4), F(1, 2, 6, 4)),
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        (F(1, 2, 3, 4), F(1, 2, 3, 4), F(1, 2, 5, 4), F(1, 2, 5, 4), F(1, 2, 3, 4), F(1, 2, 3), 0.0, False),
        (F(1, 0, 3, 4), F(1, 0, 3, 4), F(1, 0, 5, 4), F(1, 0, 5, 4), F(1, 0, 3, 4), F(1, 0, 3), 0.0, False),
    ),
    "_native_batch_norm_legit_no_training": (
        (F(2, 3), F(3), F(3), F(3), F(3), 0.5, 0.6),
        (F(2, 3).half(), F(3), F(3), F(3), F(2), 0.5, 0.6),
    ),
    "_weight_norm_interface": ((F(8, 2), F(8, 1)), (F(8, 2), F(1, 1).expand(8, 1))),
    "adaptive_max_pool2d_backward": (
        (F(4, 1, 1), F(4, 1, 4), torch.zeros(4, 1, 1, dtype=torch.int64)),
        (F(4, 1, 1), F(4, 1, 4), torch.full((4, 1, 1), -2147483649)),
    ),
    "avg_pool3d_backward": (
        (F(2, 3, 1, 2, 2), F(2, 3, 2, 4, 4), [2, 2, 2], [], [0, 0, 0], False, True, None),
        (F(1, 3, 1, 2, 2), F(2, 3, 2, 4, 4), [2, 2, 2], [], [0, 0, 0], False, True, None),
    ),
    "chunk": ((F(4), 2), (F(0, 3), 1048576)),
    "embedding_dense_backward": ((F(2, 3), ints(0, 1), 2, -1, True), (F(2, 3), ints(0, 1 << 40), 2, -1, True)),
    "embedding_dense_backward.out": ((F(2, 3), ints(0, 1), 2, -1, True), (F(5), torch.tensor(-1), 9, -1, True)),
    "gelu_backward": ((F(10, 10), F(10, 10)), (F(10, 10), F(1, 10))),
    "grid_sampler_2d_backward": (
        (F(1, 3, 5, 5), F(1, 3, 4, 4), F(1, 5, 5, 2), 0, 0, True, [True, True]),
        (F(1, 3, 5, 5), F(2, 3, 4, 4), F(2, 5, 5, 2), 0, 0, True, [True, True]),
    ),
    "lcm": ((ints(4), ints(6)), (ints(LEAST), ints(6))),
    "linalg_matrix_power": ((torch.eye(2), -2), (torch.eye(2), LEAST)),
    "lstm.input": (
        (F(2, 1, 3), [F(1, 1, 4), F(1, 1, 4)], [F(16, 3), F(16, 4), F(16), F(16)], True, 1, 0.0, False, False, False),
        (F(2, 1, 3), [F(1, 1, 4), F(1, 1, 4)], [], True, -1, 0.0, False, False, False),
    ),
    "lu_unpack": ((F(3, 3), torch.ones(3, dtype=torch.int32)), (F(3, 3), torch.full((3,), 1000, dtype=torch.int32))),
    "native_batch_norm": (
        (F(2, 3, 4), F(3), F(3), F(3), F(3), True, 0.5, 0.6),
        (F(2, 3, 4), F(3), F(3), F(1), F(3), True, 0.5, 0.6),
    ),
    "native_batch_norm_backward": (
        (F(2, 3), F(2, 3), F(3), None, None, F(3), F(3), True, 1e-5, [True, True, True]),
        (F(2, 3), F(2, 3), F(3), None, None, F(3), F(1), True, 1e-5, [True, True, True]),
    ),
    "native_layer_norm_backward": (
        (F(4, 2), F(4, 2), [2], F(4, 1), F(4, 1), F(2), F(2), [True, True, True]),
        (F(1, 1), F(1, 2), [2], F(1, 1), F(1, 1), F(2), F(2), [True, True, True]),
    ),
    "nll_loss2d_backward": (
        (F(()), F(1, 2, 1, 1), ints(1).view(1, 1, 1), None, 1, -100, F(())),
        (F(()), F(1, 2, 1, 1), ints(1 << 40).view(1, 1, 1), None, 1, -100, F(())),
    ),
    "random_.from": ((F(3), 5, None), (F(3), 2**63 - 1, None)),
    "reflection_pad2d_backward": ((F(1, 5, 5), F(1, 3, 3), [1, 1, 1, 1]), (F(1, 9, 9), F(1, 3, 3), [1, 1, 1, 1])),
    "smooth_l1_loss_backward": ((F(3), F(3), F(3), 0, 1.0), (ints(3), ints(3), ints(3), 0, 0.0)),
    "special_laguerre_polynomial_l.n_scalar": ((F(3), 4), (F(3), 1 << 40)),
    "unfold_backward": ((F(2, 3, 2), [2, 4], 1, 2, 1), (F(5, 3, 5, 5, 2), [5, 5, 5, 5, 5], 1, 3, 1)),
}
KEYWORDS = {
    "_fused_sgd_": {
        "weight_decay": 0.0,
        "momentum": 0.0,
        "lr": 0.1,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
        "is_first_step": True,
    },
    "embedding_dense_backward.out": {"out": F(2, 3)},
}


class KernelReachedError(Exception):
    pass


@pytest.mark.parametrize("name", CALLS)
def test_crashing_call_does_not_reach_kernel(name):
    def kernel(*_, **__):
        raise KernelReachedError

    overload = resolve(f"aten::{name}")
    look = checked(f"aten::{name}", overload, kernel)
    good, bad = CALLS[name]
    with pytest.raises(KernelReachedError):
        look(*good, **KEYWORDS.get(name, {}))
    with pytest.raises((RuntimeError, TypeError), match=f"aten::{name.partition('.')[0]}.*: "):
        look(*bad, **KEYWORDS.get(name, {}))
    with torch.inference_mode():  # and what is taken for a good call is one
        torch_private.kernel_of(overload)(*good, **KEYWORDS.get(name, {}))


@pytest.mark.parametrize("name", ["native_batch_norm", "_native_batch_norm_legit"])
@pytest.mark.parametrize("size", [0, 1, 7])
def test_out_statistics_are_resized_by_kernel(name, size):
    overload = resolve(f"aten::{name}.out")
    look = checked(f"aten::{name}.out", overload, torch_private.kernel_of(overload))
    given, weight, mean, variance = F(2, 3, 4), F(3), F(3), F(3)
    expected = resolve(f"aten::{name}")(given, weight, None, mean.clone(), variance.clone(), True, 0.5, 1e-5)
    outs = dict(zip(("out", "save_mean", "save_invstd"), (F(0), F(size), F(size)), strict=True))
    look(given, weight, None, mean.clone(), variance.clone(), True, 0.5, 1e-5, **outs)
    for want, got in zip(expected, outs.values(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="running_mean must have 3 elements"):
        look(given, weight, None, F(size), variance, True, 0.5, 1e-5, **outs)


def test_omitted_arguments_have_defaults():
    look = checked("aten::segment_reduce", resolve("aten::segment_reduce"), lambda *_, **__: "called")
    assert look(F(5), "max", lengths=ints(2, 3)) == "called"
    with pytest.raises(RuntimeError, match="lengths must not sum"):
        look(F(5), "max", lengths=ints(2, 4))
    assert look(F(5), "max", lengths=ints(2, 2), unsafe=True) == "called"


def test_wrong_argument_kinds_are_refused():
    look = checked("aten::gelu_backward", resolve("aten::gelu_backward"), lambda *_: pytest.fail("called"))
    with pytest.raises((RuntimeError, TypeError), match="aten::gelu_backward"):
        look(3, F(2))


def test_ops_without_rule_are_called_directly():
    kernel = torch_private.kernel_of(resolve("aten::relu"))
    assert checked("aten::relu", resolve("aten::relu"), kernel) is kernel


DTYPE, LAYOUT = Enumerated("dtype", "float64"), Enumerated("layout", "strided")
DENSE = Enumerated("memory_format", "contiguous_format")


@pytest.mark.parametrize(
    ("op", "name", "right", "wrong"),
    [
        ("aten::_to_copy", "dtype", DTYPE, Constant(-1)),
        ("aten::_to_copy", "dtype", Constant(None), SlotArg()),
        ("aten::_to_copy", "layout", LAYOUT, Constant(99)),
        ("aten::_to_copy", "layout", LAYOUT, DTYPE),
        ("aten::clone", "memory_format", DENSE, Constant(255)),
        ("aten::_to_copy", "device", SelfDevice(), Constant("cuda:1")),
        ("aten::_to_copy", "device", SelfDevice(cpu=True), Constant(0)),
        ("aten::sum.dim_IntList", "dtype", DTYPE, ListArg((DTYPE,))),
    ],
)
def test_invalid_dtype_layout_or_device_is_refused(op, name, right, wrong):
    arguments = (Operand(), ListArg((Constant(0),))) if op.startswith("aten::sum") else (Operand(),)
    check_kinds(Form(op, arguments, ((name, right),), ("new",), False), resolve(op))
    with pytest.raises(UnsupportedOperation, match=f"{op}: {name} must be "):
        check_kinds(Form(op, arguments, ((name, wrong),), ("new",), False), resolve(op))


def test_positional_argument_kinds_are_checked():
    form = Form("aten::view.dtype", (Operand(), Constant(46)), (), ("new",), False)
    with pytest.raises(UnsupportedOperation, match=r"aten::view\.dtype: dtype must be a dtype"):
        check_kinds(form, resolve("aten::view.dtype"))
