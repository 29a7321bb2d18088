"""Ops whose operands share memory with the written tensor: same results and errors as on the CPU."""

from __future__ import annotations

import pytest
import torch
from sameness import comparable


def mask(device):
    return torch.tensor([[True, False], [True, True]]).to(device)


def assign(target, index, value):
    target[index] = value
    return target


# Functions of a 2x2 mask `m` and the tensor `b` of the numbers from 0 to 5.
CASES = {
    "its own mask": lambda m, b: assign(m, m, False),
    "a transposed mask": lambda m, b: assign(m, m.t(), False),
    "a row of it": lambda m, b: assign(m, m[0], False),
    "a column of it": lambda m, b: assign(m, m[:, 0], False),
    "a row of it behind": lambda m, b: assign(m, (slice(None), m[0]), False),
    "the opposite mask": lambda m, b: assign(m, ~m, True),
    "a number from the mask": lambda m, b: assign(m, m, m[0, 1]),
    "a number in a row": lambda m, b: assign(m, m, torch.tensor([False]).to(m.device)),
    "several numbers": lambda m, b: assign(m, m, torch.tensor([False, True, False]).to(m.device)),
    "a number of its own": lambda m, b: assign(b, b > 1, b[0]),
    "a number of its own in a row": lambda m, b: assign(b, b > 1, b[4:5]),
    "a number of its own in rows": lambda m, b: assign(t := b.view(2, 3), (slice(None), t[0] > 1), t[1:, 2:]),
    "two masks": lambda m, b: assign(m[0], (m[0], m[0]), False),
    "a new dimension": lambda m, b: assign(m[0], (None, m[0]), False),
    "its own bytes": lambda m, b: (t := m.byte()).__setitem__(t, 0),
    "its own indices": lambda m, b: assign(t := b.long(), t, 0),
    "accumulated": lambda m, b: m[0].index_put_((m[0],), m[1, 1], accumulate=True),
    "as an op": lambda m, b: m.index_put_((m,), m[0, 1].clone()),
    "as an op of tensors": lambda m, b: torch.index_put(m, (m,), m[0, 1]),
    "mask beside": lambda m, b: assign(m.view(-1)[1:], m.view(-1)[:3], False),
    "masked_fill_": lambda m, b: m.masked_fill_(m, False),
    "masked_fill_ by a number of its own": lambda m, b: b[:3].masked_fill_(b[:3] > 0, b[1]),
    "masked_fill_ by a mask beside": lambda m, b: m.view(-1)[1:].masked_fill_(m.view(-1)[:3], False),
    "masked_scatter_ of itself": lambda m, b: m.masked_scatter_(m, ~m),
    "index_fill_ by a number of its own": lambda m, b: b[:3].index_fill_(0, b[:1].long(), b[1]),
    "and": lambda m, b: m.__iand__(m),
    "ldexp_ of numbers beside": lambda m, b: b[:3].ldexp_(b[1:4]),
    "ldexp out": lambda m, b: torch.ldexp(b[:3], b[3:], out=b[2:5]),
    "mvlgamma out": lambda m, b: torch.mvlgamma(b[2:5] + 0, 1, out=b[2:5]),
    "mvlgamma out beside": lambda m, b: torch.mvlgamma(b[2:5], 1, out=b[1:4]),
    "add_ of itself": lambda m, b: b.add_(b),
    "add_ of numbers beside": lambda m, b: b[:3].add_(b[1:4]),
    "add_ transposed": lambda m, b: (s := b[:4].view(2, 2)).add_(s.t()),
    "where out": lambda m, b: torch.where(m, m, ~m, out=m),
    "copy_ beside": lambda m, b: b[:3].copy_(b[1:4]),
    "expanded": lambda m, b: b[:1].expand(3).add_(1),
    "cumsum out": lambda m, b: torch.cumsum(b, 0, out=b),
    "gather out": lambda m, b: torch.gather(t := b.long(), 0, t, out=t),
    "scatter_": lambda m, b: (t := b.long()).scatter_(0, t, t),
}  # fmt: skip


def outcome(case, device):
    base = torch.arange(6.0).to(device)
    target = mask(device)
    try:
        made = case(target, base)
    except Exception as error:
        return next(kind.__name__ for kind in (IndexError, RuntimeError, Exception) if isinstance(error, kind))
    return comparable([made, target, base])


@pytest.mark.parametrize("name", CASES)
def test_op_that_writes_its_operand_equals_cpu(embedded, name):
    here, there = (outcome(CASES[name], device) for device in ("cpu", embedded))
    assert str(here) == str(there)


def test_mask_of_other_shape_raises_at_op(embedded):
    target = torch.ones(2, 2, device=embedded)
    with pytest.raises(IndexError, match=r"shape of the mask \[1, 2\] at index 0"):
        target[torch.ones(1, 2, dtype=torch.bool, device=embedded)] = 0
    assert target.tolist() == [[1, 1], [1, 1]]
