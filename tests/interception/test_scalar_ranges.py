"""Scalars that a kernel refuses are refused at the op, also where a formula or an earlier call tells what the op returns."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from long_forms import LONG

import djinn
from djinn_client.interception.dispatch import forget_calls
from djinn_client.interception.shape_inference.scalar_ranges import scalar_rule, without_floats
from djinn_client.interception.shape_inference.trials import try_small

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float16, torch.uint8, torch.int32)
NUMBERS = (-1, 256, 65536, 2**63 - 1, 0.5, 1e20, 1e39, float("inf"), float("nan"), True)


def _index(x):
    return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)


# What is done with a matrix of any length and 2 columns, and a number.
CALLS = {
    "full": lambda x, n: torch.full(x.shape, n, dtype=x.dtype, device=x.device),
    "full_like": torch.full_like,
    "new_full": lambda x, n: x.new_full(x.shape, n),
    "fill_": lambda x, n: x.clone().fill_(n),
    "assigned": lambda x, n: x.clone().__setitem__(0, n),
    "scalar_tensor": lambda x, n: torch.scalar_tensor(n, dtype=x.dtype, device=x.device),
    "masked_fill": lambda x, n: x.masked_fill(x == 1, n),
    "masked_fill_": lambda x, n: x.clone().masked_fill_(x == 1, n),
    "index_fill": lambda x, n: x.index_fill(0, _index(x), n),
    "index_fill_": lambda x, n: x.clone().index_fill_(0, _index(x), n),
    "scatter": lambda x, n: x.scatter(0, _index(x)[:, None], n),
    "scatter_": lambda x, n: x.clone().scatter_(0, _index(x)[:, None], n),
    "index_add": lambda x, n: x.index_add(0, _index(x), x, alpha=n),
    "clamp": lambda x, n: x.clamp(n, None),
    "clamp_min": lambda x, n: x.clamp_min(n),
    "clamp_": lambda x, n: x.clone().clamp_(max=n),
    "threshold": lambda x, n: F.threshold(x, n, 1),
    "threshold value": lambda x, n: F.threshold(x, 1, n),
    "hardtanh": lambda x, n: F.hardtanh(x, n, 100),
    "softplus": lambda x, n: F.softplus(x, 1, n),
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "elu": F.elu,
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "pow": torch.pow,
    "pow_": lambda x, n: x.clone().pow_(n),
    "base": lambda x, n: torch.pow(n, x),
    "linspace": lambda x, n: torch.linspace(0, n, len(x), dtype=x.dtype, device=x.device),
    "logspace": lambda x, n: torch.logspace(0, n, len(x), dtype=x.dtype, device=x.device),
    "addcmul": lambda x, n: x.addcmul(x, x, value=n),
    "addcmul_": lambda x, n: x.clone().addcmul_(x, x, value=n),
    "addcdiv": lambda x, n: x.addcdiv(x, x, value=n),
    "add": lambda x, n: x.add(x, alpha=n),
    "add_": lambda x, n: x.clone().add_(x, alpha=n),
    "added": lambda x, n: x + n,
    "rsub": lambda x, n: torch.rsub(x, x, alpha=n),
    "lerp": lambda x, n: torch.lerp(x, x, n),
    "addmm": lambda x, n: torch.addmm(x, x, x[:2], beta=n),
    "baddbmm": lambda x, n: torch.baddbmm(x[None], x[None], x[None, :2], alpha=n),
    "where": lambda x, n: torch.where(x == 1, x, n),
    "less": lambda x, n: x < n,
    "equal": lambda x, n: x == n,
    "and": lambda x, n: x & n,
    "shift": lambda x, n: x << n,
    "histc": lambda x, n: torch.histc(x.float(), 4, 0, n),
    "logit": torch.logit,
    "huber_loss": lambda x, n: F.huber_loss(x, x, delta=n),
    "smooth_l1_loss": lambda x, n: F.smooth_l1_loss(x, x, beta=n),
    "uniform_": lambda x, n: x.clone().uniform_(n, 100),
    "normal_": lambda x, n: x.clone().normal_(0, n),
    "bernoulli_": lambda x, n: x.clone().bernoulli_(n),
}


def error_of(call, x, number):
    """Return the exception of a call, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(x, number)
        except Exception as error:
            return error
    return None


def warm(call, device, dtype, kind):
    """Call with ordinary numbers of this type, so that other sizes and numbers need no meta kernel."""
    for rows in (3, 4, 5):
        for number in (1, 2):
            error_of(call, torch.ones(rows, 2, dtype=dtype, device=device), kind(number))


def cold_and_warm_numbers(call, device, dtype):
    """Yield the numbers, first without learned calls, and then each after calls that taught the result's metadata."""
    for number in NUMBERS:
        forget_calls()
        yield number
    for kind in (int, float, bool):
        forget_calls()
        warm(call, device, dtype, kind)
        yield from (number for number in NUMBERS if type(number) is kind)


@pytest.mark.parametrize("name", CALLS)
def test_out_of_range_scalar_raises_at_op(embedded, name):
    call = CALLS[name]
    differing = []
    for dtype in (
        DTYPES if LONG else DTYPES[list(CALLS).index(name) % 2 :: 2]
    ):  # floats of one size, integers of another
        here, there = (torch.ones(6, 2, dtype=dtype).to(device) for device in ("cpu", embedded))
        answers = [error_of(call, here, number) for number in NUMBERS]
        for number in cold_and_warm_numbers(call, embedded, dtype):
            expected, got = answers[NUMBERS.index(number)], error_of(call, there, number)
            if expected is None or got is None:
                same = expected is got
            else:
                same = isinstance(got, RuntimeError) == isinstance(expected, RuntimeError)
                same = same and str(expected).splitlines()[0] in str(got)
            if not same:
                differing.append((dtype, number, expected, got))
    djinn.synchronize()
    assert not differing, "\n".join(map(repr, differing[:6]))


def test_scalar_in_range_needs_no_trial(embedded):
    x = torch.ones(6, 2, device=embedded)
    warm(torch.full_like, embedded, torch.float32, float)
    warm(lambda x, n: x.masked_fill(x == 1, n), embedded, torch.float32, float)
    djinn.reset_stats()
    for rows in range(7, 12):
        longer = torch.ones(rows, 2, device=embedded)
        torch.full_like(longer, 1e30)
        longer.masked_fill(longer == 1, -float("inf"))
    for step in range(5):
        x.add_(x, alpha=0.1 * step)
    assert djinn.stats()["ops_inferred"] <= 3  # each op, the first time with such a number


def test_out_of_range_floats_stay_in_key():
    assert without_floats([1, float, 0.5, float, 65504.0]) == (1, float, float)
    assert without_floats([1, float, 0.5, float, 65505.0]) == (1, float, float, 65505.0)
    infinite = float("inf")
    assert without_floats([1, float, infinite, float, 2.0]) == (1, float, infinite, float)


def test_scalar_ranges_match_dtypes():
    rule = scalar_rule(aten.full.default, None, torch.uint8)
    assert rule.holds(([2], 255), {})
    assert not rule.holds(([2], 256), {})
    assert not rule.holds(([2],), {"fill_value": -1})
    assert rule.holds(([2], 1.0), {})
    assert not rule.holds(([2], 255.5), {})
    assert not scalar_rule(aten.add.Tensor, torch.int8, torch.int8).holds((None, None), {"alpha": 1.0})
    assert not scalar_rule(aten.addcmul.default, torch.int8, torch.int8).any_float
    assert scalar_rule(aten.addcmul.default, torch.float16, torch.float16).any_float
    assert scalar_rule(aten.sum.default, torch.int8, torch.int64) is None


def test_trial_allocates_no_large_memory():
    with pytest.raises(RuntimeError, match="without overflow"):
        try_small(aten.full.default, ([1 << 62, 4], 300), {"dtype": torch.uint8, "device": torch.device("meta")})
    try_small(aten.linspace.default, (0, 1, 1 << 50), {"dtype": torch.float32})
    try_small(aten.constant_pad_nd.default, (torch.ones(2, 2, device="meta"), [1 << 40, 0], 3), {})


def test_dtype_trial_allocates_no_large_memory():
    """A trial uses small sizes and paddings, independent of the call's."""
    bools, huge = torch.ones(2, 2, 2, dtype=torch.bool, device="meta"), 1 << 50
    with pytest.raises(NotImplementedError):
        try_small(aten.convolution.default, (bools, bools, None, [1], [huge], [1], False, [0], 1), {})
    for func, args in ((aten.randperm.default, (huge,)), (aten.eye.m, (huge, huge)), (aten.arange.start_step, (0, huge, 1)), (aten.randn.default, ([huge],))):  # fmt: skip
        try_small(func, args, {"dtype": torch.float64, "device": torch.device("meta")})


def test_trial_draws_no_random_number():
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        try_small(aten.normal_.default, (torch.ones(2, device="meta"), 0, -1), {})
    try_small(aten.rrelu_with_noise.default, (torch.ones(2, device="meta"), torch.ones(2, device="meta"), 0, 1, True), {})  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state)


def test_strides_over_64_bits_raise(embedded):
    """In a shape with a 0, the other sizes affect only strides."""
    sizes = (0, 1 << 62, 1 << 62)
    for size in ((0, 2, 3), (0, 3, 4), (0, 5, 7)):
        torch.empty(0, 1, 1, device=embedded).repeat(1, *size[1:])
    with pytest.raises(RuntimeError, match="Stride calculation overflowed"):
        torch.empty(0, 1, 1, device=embedded).repeat(1, *sizes[1:])
