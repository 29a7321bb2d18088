"""Indexing, copying between devices, and how results lie in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sameness import REMOTE, assert_same_as_cpu, assert_same_error, numbers, waves
from torch import nn

CASES = []


def case(function):
    CASES.append(function)
    return function


def tensor_on(d, *values):
    return torch.tensor(values, device=d)


# --- reading ------------------------------------------------------------------------------------------------------

INDEXES = {
    "number": lambda x, d: (x[0], x[-1], x[1, 2, 3], x[np.int64(1)], x[torch.tensor(1)], x[tensor_on(d, 1)[0]]),
    "slice": lambda x, d: (x[1:], x[:, ::2], x[..., 1], x[:, 1:, :-1], x[slice(None, None, 2)], x[5:], x[()]),
    "new dimension": lambda x, d: (x[None], x[:, None, 1:, ...], x[..., None], x[True], x[False]),
    "list": lambda x, d: (x[[0, 2]], x[[0, 2], [1, 3]], x[:, [1, 2]], x[..., [0], :], x[range(2)], x[(0, 1)]),
    "CPU tensor": lambda x, d: (
        x[torch.tensor([0, 1])],
        x[:, torch.tensor([0, 1]), 1:],
        x[torch.tensor([[0, 1], [1, 2]])],
    ),
    "remote tensor": lambda x, d: (
        x[tensor_on(d, 0, 1)],
        x[tensor_on(d, 0, 1)[:, None], tensor_on(d, 1, 2)],
        x[:, tensor_on(d, 3, -1)],
    ),
    "both": lambda x, d: (
        x[tensor_on(d, 0, 1), torch.tensor([1, 2])],
        x[tensor_on(d, 0, 1).int()],
        x[torch.tensor([2, 0]).int()],
    ),
    "array": lambda x, d: (x[np.array([0, 1])], x[:, np.array([True, False, True, False])]),
    "mask": lambda x, d: (
        x[x > 5],
        x[(x > 5).cpu()],
        x[(x > 30)[:, 0, 0]],
        x[[True, False, True]],
        x[x < 0],
        x[x > 7].sum(),
    ),
    "mask and more": lambda x, d: (
        x[tensor_on(d, True, False, True), 1:],
        x[:, torch.tensor([True, False, True, False]), 0],
    ),
    "functions": lambda x, d: (x.nonzero(), torch.where(x > 50), x.argwhere(), torch.masked_select(x, x > 50)),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_index_read_equals_cpu(embedded, kind):
    def read(d):
        return INDEXES[kind](numbers(d, 3, 4, 5), d)

    assert_same_as_cpu(read)


@case
def gathers_and_scatters(d):
    x, i = numbers(d, 3, 4), tensor_on(d, 0, 1, 2, 0)[None]
    row = numbers(d, 1, 4)
    return (
        x.gather(0, i),
        x.scatter(0, i, 9.0),
        x.scatter_add(0, i, row),
        x.scatter_reduce(0, i, row, "amax"),
        x.index_select(1, tensor_on(d, 0, 2)),
        x.index_add(0, tensor_on(d, 0, 0), numbers(d, 2, 4)),
        x.index_fill(0, tensor_on(d, 1), 5.0),
        x.index_copy(0, tensor_on(d, 0), row),
        x.masked_scatter(x > 5, numbers(d, 3, 4)),
        x.take(tensor_on(d, 0, 5)),
        x.put(tensor_on(d, 0), tensor_on(d, 7.0)),
        torch.take_along_dim(x, i, 0),
        x.select_scatter(numbers(d, 4), 0, 1),
        x.diagonal_scatter(numbers(d, 3)),
    )


# --- writing ------------------------------------------------------------------------------------------------------


@case
def assignments(d):
    x = numbers(d, 4, 5)
    x[0] = 1
    x[1, 2] = 7.5
    x[2:] = torch.tensor(3.0)
    x[:, 0] = numbers(d, 4)
    x[torch.tensor([0, 1])] = numbers(d, 5) * 10
    x[tensor_on(d, True, False, False, True)] = -1
    x[x > 20] = 0
    x[..., -1] = numbers("cpu", 4)
    x[[2], [1]] = 99
    x[2, [0, 1]] = tensor_on(d, 5.0, 6.0)
    x[:0] = 1
    x[True] = x + 1
    x[1:2, 1:2] = numbers(d, 1, 1)
    x[3] = x[2]
    x[0] += 1
    x[x == x.max()] *= 2
    x[0, 1:3] = tensor_on(d, 1, 2)
    return x


@case
def assignments_that_cast(d):
    x, y = numbers(d, 4, dtype=torch.int64), numbers(d, 4)
    x[0] = 2.7
    x[1] = True
    x[2] = torch.tensor(5.5)
    y[:2] = numbers("cpu", 2, dtype=torch.int64)
    y[torch.tensor([True, False, True, False])] = numbers(d, 2) * 5
    return x, y


@case
def index_put(d):
    x, y, z, w = numbers(d, 4), numbers(d, 4), numbers(d, 2, 3), numbers(d, 2, 3)
    x.index_put_((tensor_on(d, 0, 0, 1),), tensor_on(d, 1.0, 2.0, 3.0), accumulate=True)
    y.index_put_((y > 1,), torch.tensor(1.0, device=d), accumulate=True)
    z.index_put_((torch.tensor([0, 0]), torch.tensor([1, 1])), tensor_on(d, 1.0, 1.0), accumulate=True)
    torch.ops.aten.index_put_(w, [None, tensor_on(d, 0, 2)], torch.tensor(7.0).to(d))
    return x, y, z, w, x.index_put((torch.tensor([0, 0]),), torch.tensor(1.0).to(d), accumulate=True)


@case
def gradients_of_assignments(d):
    x, v = numbers(d, 4).requires_grad_(), numbers(d, 2).requires_grad_()
    y = x * 1
    y[torch.tensor([0, 3])] = v
    y[1:3] = 0
    y[0] *= 3
    (y * y).sum().backward()
    return x.grad, v.grad


MISTAKEN = {
    "negative step": lambda x, d: x[::-1],
    "out of range": lambda x, d: x[5],
    "too many": lambda x, d: x[0, 0, 0],
    "list out of range": lambda x, d: x[[7]].sum().item(),
    "mask of another shape": lambda x, d: x[tensor_on(d, True, False)],
    "fraction": lambda x, d: x[1.5],
    "string": lambda x, d: x["a"],
    "dict": lambda x, d: x[{}],
    "no step": lambda x, d: x[::0],
    "value of another shape": lambda x, d: x.__setitem__(0, numbers(d, 7)),
    "values of another shape": lambda x, d: x.__setitem__(torch.tensor([0, 1]), numbers(d, 3)),
    "fractions": lambda x, d: x[tensor_on(d, 1.5)],
    "write out of range": lambda x, d: x.__setitem__(9, 1),
    "values of another dtype": lambda x, d: x.__setitem__(torch.tensor([0]), numbers(d, 4).double()),
    "copy of another shape": lambda x, d: x.copy_(numbers("cpu", 7)),
    "copy of another shape back": lambda x, d: numbers("cpu", 3, 4).copy_(numbers(d, 7)),
    "copy of nothing": lambda x, d: torch.empty(2, device="meta").to(d),
}


@pytest.mark.parametrize("what", MISTAKEN)
def test_index_error_equals_cpu(embedded, what):
    def wrong(d):
        MISTAKEN[what](numbers(d, 3, 4), d)

    assert_same_error(wrong)


MIXED = {
    "add": lambda x, c: x + c,
    "add to it": lambda x, c: x.add_(c),
    "add to the CPU tensor": lambda x, c: c.add_(x),
    "matmul": lambda x, c: x @ c.T,
    "linear": F.linear,
    "cat": lambda x, c: torch.cat([x, c]),
    "where": lambda x, c: torch.where(x > 0, x, c),
    "mask": lambda x, c: x.masked_fill(c > 0, 0.0),
    "gather": lambda x, c: x.gather(0, c.long() * 0),
    "index_select": lambda x, c: x.index_select(0, torch.tensor([0])),
    "embedding": lambda x, c: F.embedding(torch.tensor([0]), x),
    "out": lambda x, c: torch.add(x, x, out=c),
    "equal": torch.equal,
    "number on the CPU as target": lambda x, c: torch.tensor(1.0).add_(x[0, 0]),
}


@pytest.mark.parametrize("what", MIXED)
def test_cpu_operand_raises(embedded, what):
    with pytest.raises(RuntimeError, match=r"on the same device|another device"):
        MIXED[what](numbers(embedded, 3, 4), numbers("cpu", 3, 4))


@case
def cpu_scalars(d):
    x, two = numbers(d, 3), torch.tensor(2.0)
    return (
        x + two,
        two + x,
        x * torch.tensor(2),
        x + torch.tensor(2.0, dtype=torch.float64),
        x.int() + torch.tensor(2.5),
        x**two,
        torch.pow(two, x),
        torch.where(x > two, x, torch.tensor(0.0)),
        x.clamp(torch.tensor(1.0)),
        torch.maximum(x, two),
        x.masked_fill(x > 1, two),
        x.lerp(x + 1, torch.tensor(0.5)),
        x * torch.tensor(1j),
        torch.full((2,), two, device=d),
        x.clone().fill_(two).mul_(two),
        two + torch.tensor(3.0, device=d),
        torch.tensor(True) & (x > 1),
    )


# --- copies between devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [("cpu", REMOTE), (REMOTE, "cpu"), (REMOTE, REMOTE)], ids="-".join)
def test_copies_in_every_layout_and_dtype(embedded, way):
    layouts = (lambda x: x, lambda x: x.t(), lambda x: x[:1].expand(4, 4), lambda x: x[::2].repeat(2, 1))
    for dtype in (torch.float32, torch.int32, torch.float64, torch.bool, torch.complex64):
        for layout in layouts:
            source, target = (d if d == "cpu" else embedded for d in way)
            expected = torch.zeros(4, 4, dtype=dtype).copy_(layout(numbers("cpu", 4, 4)))
            plain, spread = torch.zeros(4, 4, dtype=dtype, device=target), torch.zeros(4, 8, dtype=dtype, device=target)
            assert plain.copy_(layout(numbers(source, 4, 4))) is plain
            spread[:, ::2].copy_(layout(numbers(source, 4, 4)), non_blocking=True)
            assert torch.equal(plain.cpu(), expected)
            assert torch.equal(spread[:, ::2].cpu(), expected)
            assert not spread[:, 1::2].any()


@case
def copies_are_differentiable(d):
    x, z = numbers("cpu", 3).requires_grad_(), numbers(d, 3).requires_grad_()
    (torch.zeros(3, device=d).copy_(x) * 2).sum().backward()
    (torch.zeros(3).copy_(z) * 3).sum().backward()
    (x.to(d, non_blocking=True) * 4).sum().backward()
    return x.grad, x.grad.device.type, z.grad, z.grad.device


@case
def to_own_dtype_and_device(d):
    x = numbers(d, 3)
    kept = [x.to(d), x.to(x.device), x.to(torch.float32), x.to(d, torch.float32), x.to(x), x.to(torch.device(d).type)]
    kept += [x.contiguous(), x.float(), x.type_as(x), x.to(d, non_blocking=True), x.requires_grad_(False)]
    made = x.to(d, copy=True), x.to(x.dtype, copy=True), x.double(), x.detach()
    return [t is x for t in kept], [t is x for t in made]


@case
def to_with_all_signatures(d):
    x, like = numbers("cpu", 3), torch.tensor([1.0], device=d, dtype=torch.float64)
    strided = numbers(d, 2, 3).t()
    return (
        x.to(like),
        x.to(device=d, dtype=torch.int32),
        x.to(d, torch.half),
        strided.to("meta"),
        strided.to(torch.float64),
        numbers(d, 1, 2, 3, 4).to(torch.float64, memory_format=torch.channels_last),
        numbers(d, 1, 2, 3, 4).to("cpu", torch.float64, memory_format=torch.channels_last),
        numbers("cpu", 1, 2, 3, 4).to(d, torch.float64, memory_format=torch.channels_last),
    )


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "with gaps": lambda x: x[:, ::2],
    "with an offset": lambda x: x[1:],
    "expanded": lambda x: x[:1].expand(4, 3, 4, 5),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upload_keeps_strides_of_copy(embedded, layout):
    local = LAYOUTS[layout](numbers("cpu", 2, 3, 4, 5))
    expected = local.clone()
    there = local.to(embedded)
    back = LAYOUTS[layout](numbers(embedded, 2, 3, 4, 5)).cpu()
    assert there.stride() == back.stride() == expected.stride()
    assert torch.equal(there.cpu(), expected)
    assert torch.equal(back, expected)


# --- memory formats -----------------------------------------------------------------------------------------------


@case
def channels_last(d):
    x = waves(d, 2, 4, 6, 6).to(memory_format=torch.channels_last)
    conv, norm = nn.Conv2d(4, 4, 3).to(d), nn.BatchNorm2d(4).to(d)
    like = [f(x) for f in (torch.zeros_like, torch.ones_like)] + [
        torch.zeros_like(x, memory_format=torch.contiguous_format)
    ]
    return (
        [x.is_contiguous(memory_format=m) for m in (torch.channels_last, torch.contiguous_format)],
        [
            t.stride()
            for t in (conv(x), norm(x), F.max_pool2d(x, 2), F.interpolate(x, scale_factor=2), torch.empty_like(x))
        ],
        [x + 1, x.relu(), x.clone(), x.contiguous(), x * x[:, :1], torch.cat([x, x], 1), x[:1], x.to(torch.float64)],
        [x.mean((2, 3)), F.pad(x, (1, 1)), torch.where(x > 0, x, x), x.clone(memory_format=torch.contiguous_format)],
        like,
    )


@case
def channels_last_3d(d):
    x = waves(d, 1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d)
    return x, x + 1, x.is_contiguous(memory_format=torch.channels_last_3d), F.max_pool3d(x, 2)


@case
def channels_last_backward(d):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    model.to(d).to(memory_format=torch.channels_last)
    x = waves(d, 2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    model(x).square().sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


@case
def like_factories(d):
    x = numbers(d, 2, 3).t()
    same_place = torch.zeros_like(x), torch.full_like(x, 2), torch.zeros_like(x, dtype=torch.int32), x.new_zeros(3, 2)
    drawn = [f(x).stride() for f in (torch.rand_like, torch.randn_like, torch.empty_like)]
    elsewhere = (
        torch.zeros_like(x, device="cpu"),
        x.new_ones(2, device="cpu"),
        torch.ones_like(numbers("cpu", 2), device=d),
    )
    new = (
        x.new_tensor([1, 2]),
        x.new_full((2,), 3.0),
        x.new([1.0, 2.0]),
        x.new_empty(0),
    )
    return (
        same_place,
        drawn,
        elsewhere,
        [t.device.type for t in elsewhere[:2]],
        new,
        x.new_empty_strided((2, 2), (1, 2)).stride(),
    )


# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda function: function.__name__)
def test_indexing_result_equals_cpu(embedded, case):
    assert_same_as_cpu(case)
