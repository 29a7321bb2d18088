"""Each rule for a size that grows gives the valid entries that the op gives, whatever the padding holds."""

from __future__ import annotations

import math

import pytest
import torch

from djinn_server.running.compiled_step import CompiledStep, ListSource
from djinn_strategies.compiling.padded_steps import Padded, PaddedRun, SymbolicNumber, UnpaddableError
from djinn_strategies.compiling.sizes import LinearSize

N, CAPACITY = 5, 12
END = (1 << 63) - 1
BOOL = torch.bool


class GrowingTensor:
    """A tensor that has `n + plus` entries in the dimension whose size is None in its shape."""

    def __init__(self, *shape, plus=0, dtype=torch.float64):
        self.dim, self.plus = shape.index(None), plus
        torch.manual_seed(len(shape) + plus)
        whole = torch.randn([N + plus if size is None else size for size in shape], dtype=torch.float64)
        self.tensor = (whole > 0) if dtype is BOOL else (whole * 3).to(dtype) if dtype is torch.int64 else whole

    def padded(self, garbage):
        shape = [CAPACITY if at == self.dim else size for at, size in enumerate(self.tensor.shape)]
        memory = torch.full(shape, garbage).to(self.tensor.dtype)
        memory.narrow(self.dim, 0, N + self.plus).copy_(self.tensor)
        return Padded(memory, self.dim, self.plus, finite=math.isfinite(garbage))


def n(plus=0, times=1):
    """Return a symbolic number that is linear in `n`."""
    return SymbolicNumber(LinearSize(times, plus))


def resolve(argument):
    if isinstance(argument, list):
        return [resolve(one) for one in argument]
    if isinstance(argument, SymbolicNumber):
        return argument.expression.value_at(N)
    return argument.tensor if isinstance(argument, GrowingTensor) else argument


def run(op, arguments, garbage):
    """Return the result of an op by its rule, and the run."""
    env = []

    def place(argument):
        if isinstance(argument, list):
            return ListSource(tuple(place(one) for one in argument))
        env.append(argument.padded(garbage) if isinstance(argument, GrowingTensor) else argument)
        return len(env) - 1

    overload = getattr(getattr(torch.ops.aten, op.partition(".")[0]), op.partition(".")[2] or "default")
    sources = tuple(place(argument) for argument in arguments)
    env.append(None)
    written = (0,) if "_." in op else ()
    step = CompiledStep(f"aten::{op}", overload, sources, (), (), ((0, len(env) - 1),), False, written, (), False, True)
    made = PaddedRun(env, CAPACITY, torch.tensor(N), N)
    assert made.step(step)
    return env[-1], made, overload


def random_tensor(*shape):
    torch.manual_seed(7)
    return torch.randn(shape, dtype=torch.float64)


CASES = {
    "a pointwise op": ("mul.Tensor", [GrowingTensor(2, None, 3), random_tensor(1, 3)]),
    "a sum with a number": ("add.Tensor", [torch.arange(3), n(-1)]),
    "a comparison": ("lt.Scalar", [GrowingTensor(None, dtype=torch.int64), n(-3)]),
    "a mask of positions": (
        "where.self",
        [GrowingTensor(1, None, dtype=BOOL), random_tensor(1, 1), random_tensor(1, 1)],
    ),
    "an append": ("cat", [[GrowingTensor(2, None, 3), random_tensor(2, 1, 3)], 1]),
    "tensors of one length": ("cat", [[GrowingTensor(2, None, 3), GrowingTensor(2, None, 3)], -1]),
    "the last entry": ("slice.Tensor", [GrowingTensor(2, None, 3), 1, -1, END]),
    "a slice between numbers": ("slice.Tensor", [random_tensor(9, 2), 0, n(-1), n()]),
    "the first entries of a table": ("slice.Tensor", [random_tensor(9, 2), 0, 0, n()]),
    "the first entries of a long table": ("slice.Tensor", [random_tensor(40, 2), 0, 0, n()]),
    "a window that is longer": ("slice.Tensor", [GrowingTensor(2, None, 3), 1, -8, END]),
    "a window that is shorter": ("slice.Tensor", [GrowingTensor(2, None, 3), 1, -3, END]),
    "all but one": ("slice.Tensor", [GrowingTensor(2, None, 3), 1, 0, -1]),
    "one entry": ("select.int", [GrowingTensor(2, None, 3), 1, -2]),
    "the softmax of scores": ("_softmax", [GrowingTensor(2, None), -1, False]),
    "the softmax of a row": ("_softmax", [GrowingTensor(None, 3), -1, False]),
    "a sum over all entries": ("sum.dim_IntList", [GrowingTensor(2, None, 3), [1], True]),
    "a sum over others": ("sum.dim_IntList", [GrowingTensor(2, None, 3), [0]]),
    "whether any": ("any", [GrowingTensor(None, dtype=BOOL)]),
    "whether all": ("all.dim", [GrowingTensor(2, None, dtype=BOOL), 1]),
    "a running sum": ("cumsum", [GrowingTensor(2, None, dtype=torch.int64), -1]),
    "scores": ("matmul", [random_tensor(2, 1, 3), GrowingTensor(2, 3, None)]),
    "a sum of values": ("matmul", [GrowingTensor(2, 1, None), GrowingTensor(2, None, 3)]),
    "scores with a bias": ("baddbmm", [GrowingTensor(2, 1, None), random_tensor(2, 1, 3), GrowingTensor(2, 3, None)]),
    "a layer of rows": ("linear", [GrowingTensor(2, None, 3), random_tensor(4, 3)]),
    "an attention": (
        "scaled_dot_product_attention",
        [random_tensor(1, 2, 1, 4), GrowingTensor(1, 2, None, 4), GrowingTensor(1, 2, None, 4)],
    ),
    "an attention with a mask": (
        "scaled_dot_product_attention",
        [
            random_tensor(1, 2, 1, 4),
            GrowingTensor(1, 2, None, 4),
            GrowingTensor(1, 2, None, 4),
            GrowingTensor(1, 1, 1, None),
        ],
    ),
    "repeated heads": ("view", [GrowingTensor(1, 2, 3, None, 4), [1, 6, n(), 4]]),
    "a transposed view": ("view", [GrowingTensor(1, None, 2, 3), [1, -1, 6]]),
    "an expanded cache": ("expand", [GrowingTensor(1, 2, 1, None, 4), [1, 2, 3, n(), 4]]),
    "an expanded number": ("expand", [random_tensor(1, 1), [2, n(1)]]),
    "positions": ("arange.start", [0, n(1)]),
    "the present position": ("arange.start", [n(), n(1)]),
    "ones": ("ones", [[1, n(1)]]),
    "a filled tensor": ("full_like", [GrowingTensor(2, None), 3.0]),
    "rows of a table": ("embedding", [random_tensor(9, 2), GrowingTensor(2, None, dtype=torch.int64)]),
    "an entry by index": (
        "index.Tensor",
        [GrowingTensor(2, None), [torch.tensor([[0], [1]]), torch.tensor([[-1], [2]])]],
    ),
    "rows by index": ("index_select", [GrowingTensor(3, None, 2), 0, torch.tensor([2, 0])]),
    "entries by index": ("index_select", [GrowingTensor(3, None, 2), 1, torch.tensor([4, 0])]),
    "rows by an index that grows": ("index_select", [random_tensor(9, 2), 0, GrowingTensor(None, dtype=torch.int64)]),
    "ones of the same dtype": ("new_ones", [GrowingTensor(2, None), [2, 1]]),
    "a permuted tensor": ("permute", [GrowingTensor(2, None, 3), [2, 0, 1]]),
    "a new dimension": ("unsqueeze", [GrowingTensor(2, None), 1]),
    "parts of other dimensions": ("repeat", [GrowingTensor(1, None, 2), [3, 1, 2]]),
}
for case, at in (("rows of a table", 1), ("rows by an index that grows", 2)):
    CASES[case][1][at].tensor.abs_().clamp_(max=8)


@pytest.mark.parametrize("garbage", [0.0, 1e3, math.nan])
@pytest.mark.parametrize("name", CASES)
def test_valid_entries_of_padded_op_equal_unpadded(name, garbage):
    op, arguments = CASES[name]
    found, made, overload = run(op, arguments, garbage)
    expected = overload(*resolve(arguments))
    assert made.min_n <= N <= made.max_n
    if isinstance(found, Padded):
        found = found.tensor.narrow(found.dim, 0, N + found.plus)
    torch.testing.assert_close(found, expected)


REFUSED = {
    "a mean": ("mean.dim", [GrowingTensor(2, None), [1]]),
    "a sum of two lengths": ("add.Tensor", [GrowingTensor(2, None), GrowingTensor(2, None, plus=1)]),
    "a product over one length": ("matmul", [GrowingTensor(2, 1, None), random_tensor(2, CAPACITY, 3)]),
    "a view that mixes": ("view", [GrowingTensor(2, None, 4), [-1, 4]]),
    "a sort": ("sort", [GrowingTensor(2, None), 1]),
    "a written operand": ("add_.Tensor", [GrowingTensor(2, None), 1.0]),
    "a causal attention": (
        "scaled_dot_product_attention",
        [random_tensor(1, 2, 1, 4), GrowingTensor(1, 2, None, 4), GrowingTensor(1, 2, None, 4), None, 0.0, True],
    ),
    "a size that is a multiple": ("ones", [[n(times=2)]]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_op_that_would_read_padding_is_refused(name):
    op, arguments = REFUSED[name]
    with pytest.raises(UnpaddableError):
        run(op, arguments, 0.0)


def test_slice_rule_limits_lengths_to_its_case():
    shorter, longer = (run("slice.Tensor", [GrowingTensor(2, None, 3), 1, -size, END], 0.0)[1] for size in (3, 8))
    assert (shorter.min_n, longer.max_n) == (3, 7)


def test_scaled_number_and_mask_are_cached_separately():
    """Both come from the number 2 and are computed once per run."""
    made = PaddedRun([], CAPACITY, torch.tensor(N), N)
    assert made.as_number(n(times=2)).item() == 2 * N
    assert made.padding(2).tolist() == [at >= N + 2 for at in range(CAPACITY)]
