"""Arguments that kernels refuse and meta kernels take: refused at the op, in the words that the CPU has for it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import djinn

# What is done with a float and an integer tensor of 3 elements, and a 2x3x4 one.
REFUSED = {
    "random_ beyond": lambda x, i, n: i.to(torch.int8).random_(0, 300),
    "random_ below": lambda x, i, n: i.to(torch.int8).random_(-300, 1),
    "random_ empty range": lambda x, i, n: i.random_(3, 1),
    "uniform_": lambda x, i, n: x.uniform_(3, -1),
    "normal_": lambda x, i, n: x.normal_(0, -1),
    "exponential_": lambda x, i, n: x.exponential_(-1),
    "bernoulli_": lambda x, i, n: x.bernoulli_(2.0),
    "geometric_": lambda x, i, n: x.geometric_(2),
    "log_normal_": lambda x, i, n: x.log_normal_(0, -1),
    "cauchy_": lambda x, i, n: x.cauchy_(0, -1),
    "polar": lambda x, i, n: torch.polar(x, x.double()),
    "div to complex half": lambda x, i, n: x.half() / 2j,
    "mm of bools": lambda x, i, n: torch.mm(n[0] > 1, (n[0] > 1).mT),
    "sort of complex": lambda x, i, n: x.to(torch.complex64).msort(),
    "arange of bools": lambda x, i, n: torch.arange(0, 300, dtype=torch.bool, device=x.device),
    "shift of floats": lambda x, i, n: x << 1,
    "and of floats": lambda x, i, n: i & 0.5,
    "sub_ of a bool": lambda x, i, n: i.sub_(True),
    "multinomial none": lambda x, i, n: torch.multinomial(x, 0),
    "multinomial more": lambda x, i, n: torch.multinomial(x, 4),
    "complex": lambda x, i, n: torch.complex(x, x.double()),
    "masked_scatter": lambda x, i, n: x.masked_scatter(i.to(torch.uint8), x),
    "bucketize": lambda x, i, n: torch.bucketize(x, n[0]),
    "as_strided_scatter": lambda x, i, n: x.as_strided_scatter(x[:2], (2,), (200,)),
    "conv dilation": lambda x, i, n: F.conv1d(n, n[:, :, :1], dilation=0),
    "conv padding": lambda x, i, n: F.conv1d(n, n[:, :, :1], padding=-1),
    "index nothing": lambda x, i, n: x.reshape(3, 1)[:, :0][:, [0, 1]],
    "cat overlap": lambda x, i, n: torch.cat([x[:1], x[1:]], out=x),
    "take overlap": lambda x, i, n: torch.take(x, i, out=x),
    "index_copy_ overlap": lambda x, i, n: x.index_copy_(0, i[:2], x[:2]),
    "index_add_ overlap": lambda x, i, n: i.index_add_(0, i, i),
    "scatter_ overlap": lambda x, i, n: x.scatter_(0, i, x),
    "put_ overlap": lambda x, i, n: i.put_(i, i),
    "put_ part": lambda x, i, n: x.put_(i[0], x[0]),
    "index_put_ overlap": lambda x, i, n: x.__setitem__(i, x[0]),
    "index_fill_ overlap": lambda x, i, n: i.index_fill_(0, i, 0),
    "segment_reduce lengths": lambda x, i, n: torch.segment_reduce(x, "max", lengths=i),
    "flip twice": lambda x, i, n: n.flip(0, 0),
    "flip beyond": lambda x, i, n: n.flip(0, 3),
    "out dtype": lambda x, i, n: torch.add(x, 1.5, out=i),
    "fill_ complex": lambda x, i, n: x.fill_(1 + 1j),
    "index_fill_ complex": lambda x, i, n: n.index_fill_(1, i[:1], 1 + 1j),
    "masked_fill_ complex": lambda x, i, n: x.masked_fill_(x > 1, 1j),
    "masked_fill_ overlap": lambda x, i, n: (m := i > 1)[1:].masked_fill_(m[:-1], False),
    "masked_fill_ mask": lambda x, i, n: x.masked_fill_(x, 1),
    "scatter_ complex": lambda x, i, n: x.scatter_(0, i, 1j),
    "assigned complex": lambda x, i, n: x.__setitem__(0, 1j),
    "full complex": lambda x, i, n: torch.full((2,), 1j, dtype=torch.float32, device=x.device),
    "clamp complex": lambda x, i, n: x.clamp(1j),
    "lerp complex": lambda x, i, n: x.lerp(x, 1j),
    "add alpha complex": lambda x, i, n: x.add(x, alpha=1j),
    "addmm alpha complex": lambda x, i, n: torch.addmm(n[0], n[0, :, :3], n[1, :3], alpha=1j),
    "gt_ broadcast": lambda x, i, n: i[:1].gt_(x),
    "heaviside dtypes": lambda x, i, n: torch.heaviside(x, x.double()),
    "heaviside out": lambda x, i, n: torch.heaviside(x, x.half(), out=torch.empty_like(x)),
    "index on the CPU": lambda x, i, n: x[torch.tensor([0, 3])],
    "index on the CPU, from the end": lambda x, i, n: n[:, torch.tensor([0, -4])],
    "index behind a mask": lambda x, i, n: n[torch.tensor([[True, False, True]] * 2), torch.tensor([0, 4, 0, 1])],
    "assigned at an index on the CPU": lambda x, i, n: x.__setitem__(torch.tensor([0, 3]), 1.0),
    "sum over too many": lambda x, i, n: x[:1].reshape([1] * 65).sum(0),
    "argmax over too many": lambda x, i, n: x[:1].reshape([1] * 65).argmax(0),
    "norm of rows of integers": lambda x, i, n: F.embedding(i[:1], i.reshape(3, 1), max_norm=1.0),
    "addcdiv of integers": lambda x, i, n: torch.addcdiv(i, i, i),
}


def error_of(refused, device):
    x, i = torch.tensor([1.0, 2.0, 3.0]).to(device), torch.tensor([0, 1, 2]).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            refused(x, i, torch.ones(2, 3, 4).to(device))
        except Exception as error:
            djinn.synchronize()
            assert (x.tolist(), i.tolist()) == ([1, 2, 3], [0, 1, 2]), "what would have been written is as it was"
            return error


@pytest.mark.parametrize(("number", "classes"), [(5, 3), (-1, 3), (-1, -1)])
def test_one_hot_rejects_out_of_range_classes(embedded, number, classes):
    given = torch.tensor([0, number])
    with pytest.raises(RuntimeError, match="Class values must be"):
        F.one_hot(given, classes)
    with pytest.raises(RuntimeError, match=r"Class values must be|out of bounds"):
        F.one_hot(given.to(embedded), classes).cpu()


@pytest.mark.parametrize("name", REFUSED)
def test_kernel_error_equals_cpu(embedded, name):
    expected, got = error_of(REFUSED[name], "cpu"), error_of(REFUSED[name], embedded)
    assert isinstance(got, type(expected)), f"{got!r} where the CPU says {expected!r}"
    assert str(expected) in str(got)


def test_index_error_equals_cpu_after_other_failure(embedded):
    given, index = torch.ones(2, 3, device=embedded), torch.tensor([0, 1, 1], device=embedded)
    given[given > 0] = torch.ones(2, device=embedded)
    with pytest.raises(RuntimeError, match="cannot be broadcast to indexing result"):
        given.cpu()
    with pytest.raises(IndexError, match=r"could not be broadcast together with shapes \[2\], \[3\]"):
        given[index[:2], index]


def test_formula_raises_errors_of_kernel(embedded):
    """A formula replaces the meta kernel after it was right for another size."""
    for size in (5, 6, 7, 8):
        assert torch.ones(size, 3, device=embedded).flip(0, 1).shape == (size, 3)
    with pytest.raises(RuntimeError, match=r"appears multiple times|duplicate"):
        torch.ones(9, 3, device=embedded).flip(1, 1)
    with pytest.raises(IndexError, match="out of range"):
        torch.ones(10, 3, device=embedded).flip(0, 2)


def test_warning_names_user_line(embedded):
    x, mask = torch.ones(3, device=embedded), torch.tensor([1, 0, 1], dtype=torch.uint8, device=embedded)
    with pytest.warns(UserWarning, match=r"indexing with dtype torch.uint8 is now deprecated") as caught:
        assert x[mask].shape == (2,)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.fixture
def warn_always():
    """Let PyTorch repeat its warnings, which it otherwise gives once per process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


WARNED_OF = {
    "std": lambda device: torch.ones(1, device=device).std(),
    "var_mean of rows": lambda device: torch.var_mean(torch.ones(3, 1, device=device), 1),
    "std with a correction": lambda device: torch.ones(2, 3, device=device).std(0, correction=2),
    "var of nothing": lambda device: torch.ones(0, device=device).var(),
    "complex to real": lambda device: torch.ones(2, dtype=torch.cfloat, device=device).float(),
    "complex into real": lambda device: torch.zeros(2, device=device).copy_(
        torch.ones(2, dtype=torch.cfloat, device=device)
    ),
    "where of bytes": lambda device: torch.where(
        torch.ones(2, dtype=torch.uint8, device=device), torch.ones(2, device=device), torch.zeros(2, device=device)
    ),
    "searchsorted": lambda device: torch.searchsorted(
        torch.ones(6, device=device), torch.ones(4, 2, device=device).t()
    ),
    "bucketize": lambda device: torch.bucketize(torch.ones(4, 2, device=device).t(), torch.ones(6, device=device)),
    "filling an expanded tensor": lambda device: (
        torch.zeros(1, device=device).expand(3).masked_fill_(torch.ones(3, dtype=torch.bool, device=device), 1.0)
    ),
    "indexing an expanded tensor": lambda device: (
        torch.zeros(1, device=device)
        .expand(3)
        .index_put_((torch.tensor([0], device=device),), torch.tensor([1.0], device=device))
    ),
    "enough elements": lambda device: torch.ones(300, device=device).half().var(),
    "real to complex": lambda device: torch.ones(2, device=device).to(torch.cfloat),
}
if hasattr(torch.ops.aten, "cholesky"):  # PyTorch 2.14 has no such op
    WARNED_OF["cholesky"] = lambda device: torch.cholesky(torch.eye(2, device=device))


@pytest.mark.parametrize("name", WARNED_OF)
def test_kernel_warnings_name_user_line_each_time(embedded, warn_always, name):
    said = {}
    for device in ("cpu", embedded):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                WARNED_OF[name](device)
        said[device] = [(str(one.message), one.category, one.filename) for one in caught]
    assert said[embedded] == said["cpu"]


def test_inexact_random_range_warns(embedded):
    with pytest.warns(UserWarning, match="to - 1 is out of bounds"):
        torch.ones(3, device=embedded, dtype=torch.float16).random_(0, 2050)


def test_inexact_random_range_warns_at_each_call(embedded):
    x = torch.ones(3, device=embedded, dtype=torch.float16)
    for _ in range(3):
        with pytest.warns(UserWarning, match="to - 1 is out of bounds"):
            x.random_(0, 2050)


def test_experimental_dtype_warns_as_often_as_pytorch(embedded):
    x = torch.ones(3, dtype=torch.complex32, device=embedded)
    torch.set_warn_always(True)
    try:
        for _ in range(2):
            with pytest.warns(UserWarning, match="ComplexHalf support is experimental"):
                x + 1
    finally:
        torch.set_warn_always(False)


def test_filling_expanded_tensor_warns(embedded):
    expanded, mask = torch.ones(1, device=embedded).expand(3), torch.tensor([True, False, True], device=embedded)
    index = mask.long()
    fillings = {
        "masked_fill_": lambda: expanded.masked_fill_(mask, 0.0),
        "index_fill_": lambda: expanded.index_fill_(0, index, 0.0),
        "index_put_": lambda: expanded.index_put_((index,), torch.zeros(3, device=embedded)),
    }
    for name, fill in (*fillings.items(), *fillings.items()):
        with pytest.warns(UserWarning, match=f"Use of {name} on expanded tensors"):
            fill()


def test_resized_out_tensor_warns_at_each_call(embedded):
    x = torch.ones(5, device=embedded)
    for _ in range(3):
        out = torch.ones(6, device=embedded)
        with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
            torch.sin(x, out=out)
        assert torch.equal(out, x.sin())


def test_scalar_of_other_dtype_is_checked_again(embedded):
    x = torch.ones(3, dtype=torch.uint8, device=embedded)
    assert torch.nextafter(x, torch.tensor(2.5)).shape == (3,)
    with pytest.raises(NotImplementedError, match="ComplexFloat"):
        torch.nextafter(x, torch.tensor(1j))
    narrow = torch.ones(3, device=embedded).to(torch.float8_e4m3fn)
    assert (torch.tensor(2.0, dtype=torch.float8_e4m3fn) * narrow).shape == (3,)
    with pytest.raises(NotImplementedError, match="Float8"):
        narrow * torch.tensor(2.0, dtype=torch.float8_e4m3fn)


def test_untagged_in_place_ops_raise_at_op(embedded):
    x = torch.ones(3, dtype=torch.bool, device=embedded)
    for refused in (x.abs_, lambda: torch._foreach_abs_([x])):
        with pytest.raises(NotImplementedError, match="Bool"):
            refused()
    assert x.tolist() == [True] * 3


def test_empty_tensors_do_not_overlap(embedded):
    out = torch.empty(0, 0, device=embedded)
    assert torch.matmul(torch.ones(0, device=embedded), torch.ones(0, 0, 0, device=embedded), out=out) is out


def test_copy_broadcasts_scalar(embedded):
    for shape in ((3,), ()):
        assert (torch.zeros(shape, device=embedded).copy_(2.5) == 2.5).all()


def test_index_fill_accepts_cpu_index(embedded):
    assert torch.zeros(3, device=embedded).index_fill(0, torch.tensor([1]), 5.0).tolist() == [0, 5, 0]


def test_random_op_refused_by_meta_draws_once(embedded):
    """The meta kernel refuses `normal_` of integers. If the executor refuses it too, the tensor is unchanged."""
    x = torch.arange(3, device=embedded)
    with pytest.raises((RuntimeError, NotImplementedError)):
        x.normal_()
    assert x.tolist() == [0, 1, 2]


def test_equal_strides_are_ordered_by_size(embedded):
    """Kernels order dimensions with equal strides by size, for operands that overlap themselves."""
    for shape in ((4, 3, 2), (4, 2, 3)):
        here, there = (torch.empty_strided(shape, (10, 1, 1), device=d) for d in ("cpu", embedded))
        assert there.fill_(1.0).exp().stride() == here.fill_(1.0).exp().stride()


def test_segment_reduce_accepts_negative_axis(embedded):
    data, lengths = torch.arange(6.0, device=embedded), torch.tensor([2, 4], device=embedded)
    assert torch.segment_reduce(data, "sum", lengths=lengths, axis=-1).tolist() == [1, 14]
