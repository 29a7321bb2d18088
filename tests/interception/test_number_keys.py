"""Cache keys of numbers: 0.0 and -0.0, 1 and 1.0 differ; a nan hits. Tested for cached calls and cached plans."""

from __future__ import annotations

import math

import pytest
import torch

import djinn

REMOTE = "remote_accelerator:0"
NUMBERS = (0.0, -0.0, 0, False, 1, True, 1.0, math.nan, -math.inf, math.inf, -1, -1.0)
COMPLEX = (
    complex(0.0, 0.0),
    complex(-0.0, 0.0),
    complex(0.0, -0.0),
    complex(math.nan, 0.0),
    complex(0.0, math.nan),
    1j,
    -1j,
)
OPS = {
    "full": lambda x, n: torch.full((2,), n, device=x.device),
    "full_like": torch.full_like,
    "fill": lambda x, n: torch.empty_like(x).fill_(n),
    "mul": lambda x, n: x * n,
    "add": lambda x, n: x + n,
    "div": lambda x, n: x / n,
    "rdiv": lambda x, n: n / x,
    "pow": lambda x, n: x**n,
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n),
    "where": lambda x, n: torch.where(x > 1, x, n),
    "eq": lambda x, n: x == n,
    "set": lambda x, n: x.clone().index_fill_(0, torch.tensor([0]).to(x.device), n),
    "number in a tensor": lambda x, n: x * torch.tensor(n),
    "lists": lambda x, n: torch._foreach_mul([x, x], [n, n])[0],
    "pad": lambda x, n: torch.nn.functional.pad(x, (1, 1), value=n),
}


def text_of(call):
    """Return the result of `call` as text, with the signs of zeros, or the class of its error."""
    try:
        made = call()
    except Exception as error:
        return type(error).__name__
    made = made.cpu()
    parts = torch.view_as_real(made).flatten() if made.is_complex() else made
    signs = torch.where(parts.isnan(), False, parts.signbit())
    return str(made.dtype), repr(made.tolist()), signs.tolist()


def alternate(numbers):
    """Return each pair of numbers in alternation. The second call with a number hits the cache."""
    return [n for first in numbers for second in numbers for n in (first, second)]


@pytest.mark.parametrize("op", OPS)
def test_call_cache_distinguishes_equal_numbers_by_type_and_sign(embedded, op):
    for x in (torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([-1, 0, 2])):
        expected = {(type(n), repr(n)): text_of(lambda x=x, n=n: OPS[op](x, n)) for n in NUMBERS}
        there = x.to(embedded)
        for number in alternate(NUMBERS[::-1]) if op in ("full", "mul", "div") else NUMBERS * 2:
            found = text_of(lambda: OPS[op](there, number))  # noqa: B023 - called at once
            assert found == expected[type(number), repr(number)], number


@pytest.mark.parametrize("op", ["full", "fill", "mul", "add", "masked_fill"])
def test_call_cache_distinguishes_equal_complex_numbers(embedded, op):
    x = torch.tensor([1 + 1j, -1j, 2.0])
    there = x.to(embedded)
    if op == "masked_fill":
        OPS[op] = lambda x, n: x.masked_fill(x.real > 1, n)
    for number in COMPLEX * 2:
        assert text_of(lambda: OPS[op](there, number)) == text_of(lambda: OPS[op](x, number)), number  # noqa: B023


def test_repeated_call_with_nan_hits_the_call_cache(embedded):
    x = torch.tensor([-1.0, 2.0]).to(embedded)

    def run():
        nan = float("nan")  # a new object each time
        made = [x.masked_fill(x > 0, nan), torch.full((2,), nan, device=embedded), x * nan, x.clamp(min=nan)]
        made += [torch.where(x > 0, nan, x), torch.full((2,), complex(nan, 1), device=embedded)]
        return [one.isnan().tolist() for one in made]

    expected = [run() for _ in range(2)][1]
    inferred = djinn.stats()["ops_inferred"]
    for _ in range(3):
        assert run() == expected
    assert djinn.stats()["ops_inferred"] == inferred


def test_plan_is_reused_for_a_program_with_nan(embedded, plans_all):
    x = torch.tensor([-1.0, 2.0]).to(embedded)

    def run():
        nan = float("nan")
        same = [x.masked_fill(x > 0, nan) for _ in range(2)]  # merged while the numbers are equal
        return (same[0] + same[1]).tolist()

    for _ in range(3):
        run()
    plans = djinn.stats()["plans_made"]
    for _ in range(3):
        assert math.isnan(run()[1])
    assert djinn.stats()["plans_made"] == plans


def test_plan_is_not_reused_for_an_equal_number_of_other_type_or_sign(embedded, plans_all):
    x = torch.tensor([-1.0, 0.0, 2.0])
    there = x.to(embedded)

    def run(x, first, second):
        return (x / first).tolist(), torch.copysign(torch.ones_like(x), x * second).tolist()

    for pair in [(0.0, 0.0), (0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0), (0.0, 0), (1, 1.0), (True, 1)] * 2:
        assert repr(run(there, *pair)) == repr(run(x, *pair)), pair


def test_compiled_graph_distinguishes_equal_numbers(embedded):
    def divide(x, number):
        return x / number

    compiled = torch.compile(divide, backend="djinn", dynamic=True)
    x = torch.tensor([-1.0, 2.0])
    there = x.to(embedded)
    for number in (2.0, 0.0, -0.0, math.nan, 1, True, 1.0, -0.0, 0.0):
        assert repr(compiled(there, number).tolist()) == repr(divide(x, number).tolist()), number


@pytest.mark.parametrize("op", OPS)
def test_ops_of_one_program_keep_their_own_scalars(embedded, op):
    """A call with one scalar too many or too few would shift the scalars of later ops."""
    here, there = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).to(embedded)

    def results(x):
        return [(OPS[op](x, n), x.sum(-1, keepdim=True) + 3)[1] for n in (True, 2, 0.5, False) for _ in range(3)]

    assert [made.tolist() for made in results(there)] == [made.tolist() for made in results(here)]
