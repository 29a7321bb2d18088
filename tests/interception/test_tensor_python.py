"""Remote tensors as Python values: numbers, containers, text, other libraries; what cannot be says so by name."""

from __future__ import annotations

import operator
import weakref

import numpy as np
import pytest
import torch
from sameness import REMOTE, assert_same_as_cpu, assert_same_error, complexes, numbers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import djinn
from djinn_client.interception import sync

CASES = []


def case(function):
    CASES.append(function)
    return function


# --- numbers and containers ---------------------------------------------------------------------------------------


@case
def python_numbers(d):
    x = numbers(d, 2, 3)
    one = x[0, 1]
    conversions = one.item(), float(one), int(x[1, 0]), bool(one), complex(one), operator.index(x[0, 2].long())
    texts = f"{one:.2f}", f"{one}", f"{one:>6}", f"{one + 1}"
    return conversions, texts, x.tolist(), [1, 2, 3][one.long()], torch.zeros(x[0, 2].long(), device=d).shape


@case
def sequences(d):
    x = numbers(d, 2, 3)
    a, b = numbers(d, 2)
    sums = sum(numbers(d, 3)), max(numbers(d, 3)), sorted(numbers(d, 3), reverse=True), any(numbers(d, 3) > 1)
    return (
        len(x),
        list(x),
        list(reversed(x)),
        2 in numbers(d, 3),
        7 in numbers(d, 3),
        a,
        b,
        sums,
        [float(v) for v in x[0]],
    )


@case
def tensors_as_keys(d):
    x, y = numbers(d, 3), numbers(d, 3)
    found = {x: 1, y: 2}
    return found[x], found[y], hash(x) == hash(x), hash(x) == hash(y), x in [x, y], len({x, y, x})


@case
def sizes_and_kinds(d):
    x = numbers(d, 2, 3)
    names = (
        "ndim nbytes itemsize layout is_cuda is_meta is_sparse is_quantized is_nested grad_fn retains_grad output_nr"
    )
    asked = (
        "dim numel nelement element_size is_floating_point is_complex is_signed is_contiguous storage_offset is_pinned"
    )
    return (
        [getattr(x, name) for name in names.split()],
        [getattr(x, name)() for name in asked.split()],
        (x.size(), x.size(0), x.shape[1], x.stride(0), x.is_same_size(x), torch.is_tensor(x), torch.is_storage(x)),
        [x.to(t).dtype for t in (torch.half, torch.bfloat16, torch.double, torch.int, torch.uint8, torch.cfloat)],
        [t.dtype for t in (x.half(), x.char(), x.short(), x.bool(), x.cdouble(), x.byte(), x.long())],
        (x.device == torch.device(d), {torch.device(d): 1}[x.device], isinstance(x, torch.Tensor), hasattr(x, "nope")),
    )


@case
def operators(d):
    x, y = numbers(d, 3), numbers(d, 3) * 2
    whole = x.long()
    compared = x == y, x != y, x < y, x <= 1, x > y, x >= torch.tensor(1.0), x == 1
    odd = x is not None, x == None, x == "a", x != ()  # noqa: E711 - what programs write
    made = -x, +x, abs(-x), x // 2, x % 2, 2**x, x**2, 2 / (x + 1), 5 // (x + 1), 5 % (x + 1), x @ y, 2 - x, ~(x > 1)
    bits = whole << 1, whole >> 1, 1 << whole, whole & 1, whole | 1, whole ^ 1, 1 & whole
    return compared, odd, made, bits


@case
def operators_in_place(d):
    x = numbers(d, 3)
    before = x
    x += 1
    x -= 2
    x *= 3
    x /= 2
    x //= 1
    x %= 5
    x **= 2
    y = x.long()
    y <<= 1
    y >>= 1
    y &= 7
    y |= 1
    y ^= 2
    return x, y, x is before


@case
def equality(d):
    x = numbers(d, 3)
    torch.testing.assert_close(x, numbers(d, 3))
    torch.testing.assert_close({"a": [x]}, {"a": [numbers("cpu", 3)]}, check_device=False)
    exact = torch.equal(x, x.clone()), torch.equal(x, x + 1), torch.equal(x, numbers(d, 4)), x.equal(x)
    return exact, torch.allclose(x, x + 1e-9), x.allclose(x + 1), torch.isclose(x, x + 1), torch.eq(x, x).all()


@case
def attributes_and_weak_references(d):
    x, seen = numbers(d, 3), []
    x.note = 1
    known = weakref.ref(x)
    weakref.finalize(x, seen.append, 1)
    kept = x.note, vars(x)["note"], known() is x
    del x
    return kept, known(), seen


# --- text ---------------------------------------------------------------------------------------------------------


def without_device(text):
    return text.replace(f", device='{REMOTE}'", "")


PRINTED = {
    "few": lambda d: numbers(d, 3),
    "matrix": lambda d: numbers(d, 2, 2).t(),
    "one": lambda d: torch.tensor(1.0, device=d),
    "none": lambda d: torch.empty(0, 3, device=d),
    "many": lambda d: numbers(d, 50, 50),
    "with gradient": lambda d: numbers(d, 3).requires_grad_(),
    "result": lambda d: numbers(d, 3).requires_grad_() * 2,
    "parameter": lambda d: torch.nn.Parameter(numbers(d, 2)),
    "integers": lambda d: numbers(d, 3).long(),
    "bool": lambda d: numbers(d, 3) > 1,
    "bfloat16": lambda d: numbers(d, 2).to(torch.bfloat16),
    "large": lambda d: numbers(d, 2) * 1e9,
    "not finite": lambda d: torch.tensor([float("nan"), float("inf")], device=d),
    "conjugate": lambda d: complexes(d).conj(),
    "negated": lambda d: complexes(d).conj().imag,
}


@pytest.mark.parametrize("what", PRINTED)
def test_print_equals_cpu(embedded, what):
    here, there = PRINTED[what]("cpu"), PRINTED[what](embedded)
    for text in (repr, str, "{}".format):
        assert without_device(text(there)) == text(here)
    assert (f"device='{REMOTE}'" in repr(there)) is (REMOTE not in repr(here))


def test_print_options_apply_to_remote_tensors(embedded):
    torch.set_printoptions(precision=2, sci_mode=True, threshold=5, edgeitems=1)
    try:
        for shape in ((3,), (20,)):
            assert without_device(repr(numbers(embedded, *shape) * 1.23)) == repr(numbers("cpu", *shape) * 1.23)
    finally:
        torch.set_printoptions(profile="default")
    djinn.reset_stats()
    assert numbers(embedded, 3).__repr__(tensor_contents="...") == f"tensor(..., device='{REMOTE}')"
    assert djinn.stats()["round_trips"] == 0


@case
def printed_inside_transforms(d):
    seen = []
    torch.func.vmap(lambda row: (seen.append(repr(row)), row)[1])(numbers(d, 2, 3))
    torch.func.grad(lambda x: (seen.append(repr(x)), x.sum())[1])(numbers(d, 3))
    return [without_device(text) for text in seen]


# --- making tensors -----------------------------------------------------------------------------------------------


@case
def factories_from_data(d):
    x = numbers(d, 3)
    return (
        torch.as_tensor(x) is x,
        torch.as_tensor(x, dtype=torch.float64),
        torch.as_tensor(x, device="cpu").device.type,
        [torch.as_tensor(data, device=d) for data in ([1, 2], np.ones(2), range(3))],
        [torch.tensor(data, device=d) for data in (3, [], [[1.0, 2]], np.ones(2), True, 1j)],
        torch.tensor([1.0], device=d, requires_grad=True),
        torch.tensor([x[0], x[1]]),
        torch.asarray(x, copy=True),
        torch.asarray(x, dtype=torch.float64),
        [torch.asarray(data, device=d) for data in ([1.0, 2.0], np.ones(2, dtype=np.float32))],
        torch.from_numpy(np.arange(3)).to(d),
        torch.frombuffer(bytearray(b"abcd"), dtype=torch.uint8).to(d),
    )


@case
def factories_from_sizes(d):
    ends = torch.linspace(0, 1, 3, device=d), torch.logspace(0, 1, 3, device=d), torch.arange(0, 1, 0.25, device=d)
    filled = [torch.full((2,), value, device=d) for value in (True, 2, 1.5, 1j)]
    shapes = torch.eye(2, 3, device=d), torch.tril_indices(3, 3, device=d), torch.empty(2, 0, device=d)
    outs = [torch.empty(0, device=d) for _ in range(3)]
    torch.arange(3, out=outs[0])
    torch.cat([ends[0], ends[1]], out=outs[1])
    torch.linspace(0, 1, 3, out=outs[2])
    grids = (
        torch.meshgrid(numbers(d, 2), numbers(d, 3), indexing="ij"),
        torch.cartesian_prod(numbers(d, 2), numbers(d, 2)),
    )
    return (
        ends,
        filled,
        shapes,
        outs,
        grids,
        torch.hann_window(4, device=d),
        torch.kaiser_window(5, False, beta=3.0, device=d),
        torch.empty_permuted((2, 3), (1, 0), device=d).stride(),
    )


@case
def default_devices(d):
    with torch.device(d):
        made = (
            torch.ones(2),
            torch.tensor([1.0]),
            torch.arange(3),
            torch.eye(2),
            torch.nn.Linear(2, 2).weight,
            torch.rand(2),
        )
    torch.set_default_device(d)
    try:
        with torch.device("meta"):
            meta, moved = torch.nn.Linear(2, 2).weight, torch.ones(2, device=d)
        with torch.device("cpu"):
            here = torch.ones(2)
        return [t.device for t in made], meta, moved, here.device.type, torch.ones(2).device
    finally:
        torch.set_default_device(None)


@case
def default_dtypes(d):
    x = numbers(d, 2).long()
    before = x / 2, torch.sin(x), x.bool() * 1.5
    torch.set_default_dtype(torch.float64)
    try:
        made = (
            torch.ones(2, device=d),
            torch.tensor([1.0], device=d),
            torch.full((2,), 1.5, device=d),
            torch.rand(2, device=d),
        )
        after = (
            x / 2,
            torch.sin(x),
            x.bool() * 1.5,
            torch.where(x > 0, x, 0.1),
            x * 1j,
            x / x,
            torch.atan2(x, x),
            x > 0.1,
        )
        return before, made, after, x / 2
    finally:
        torch.set_default_dtype(torch.float32)


# --- modes --------------------------------------------------------------------------------------------------------


@case
def modes_see_the_ops_of_the_program(d):
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = numbers(d, 3)
    with Functions():
        torch.sin(x + 1)
    with Ops():
        torch.cos(x + 2)
    with FlopCounterMode(display=False) as counter:
        torch.nn.Linear(3, 2).to(d)(x).sum().backward()
    return seen, counter.get_total_flops()


@case
def fake_tensors(d):
    x = numbers(d, 2)
    with FakeTensorMode() as mode:
        y = torch.nn.Linear(2, 2, device=d)(torch.ones(2, device=d))
        z = mode.from_tensor(x) + 1
    return [(type(t).__name__, t.shape, t.device) for t in (y, z)], x + 1


# --- what cannot be -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_numpy_conversion_raises(embedded):
    x = numbers(embedded, 3)
    for refused in (x.numpy, x.__array__, lambda: np.array(x), lambda: np.asarray(x), lambda: x + np.ones(3)):
        with pytest.raises(
            TypeError,
            match=r"can't convert (a )?remote_accelerator:0 (device type )?tensor to numpy. Use Tensor.cpu\(\)",
        ):
            refused()
    assert x.numpy(force=True).tolist() == x.requires_grad_().numpy(force=True).tolist() == [0.0, 1.0, 2.0]
    assert complexes(embedded).conj().numpy(force=True).tolist() == complexes("cpu").conj().tolist()


def test_row_major_copy_needs_no_meta_kernel(embedded, monkeypatch):
    x = numbers(embedded, 6).reshape(2, 3)
    monkeypatch.delattr(sync, "laid_out")
    assert x.cpu().stride() == (3, 1)
    with pytest.raises(NameError):
        x.t().cpu()


def test_dlpack_shares_device_memory(embedded):
    x = numbers(embedded, 3)
    shared = torch.from_dlpack(torch.to_dlpack(x))
    x.add_(1)
    assert shared.device == x.device
    assert shared.tolist() == x.tolist() == [1.0, 2.0, 3.0]
    part = torch.from_dlpack(torch.to_dlpack(x[1:]))
    del x
    part.mul_(2)
    assert shared.tolist() == [1.0, 4.0, 6.0]
    for door in (torch.from_dlpack, np.from_dlpack):
        with pytest.raises((ValueError, RuntimeError), match=r"Unknown device type|Unsupported device"):
            door(numbers(embedded, 3))


def test_foreign_memory_is_copied_to_device(embedded):
    given = np.arange(3.0)
    made = [
        torch.from_dlpack(given).to(embedded),
        torch.from_dlpack(given, device=embedded),
        torch.from_dlpack(torch.from_numpy(given), device=embedded, copy=True),
        torch.asarray(given, device=embedded),
        torch.asarray(torch.to_dlpack(torch.from_numpy(given)), device=embedded),
        torch.as_tensor(given, device=embedded),
        torch.frombuffer(given, dtype=torch.float64).to(embedded),
    ]
    given += 1
    assert [one.tolist() for one in made] == [[0.0, 1.0, 2.0]] * len(made)
    assert {one.device for one in made} == {torch.device(embedded)}
    for aliased in (
        lambda: torch.asarray(given, device=embedded, copy=False),
        lambda: torch.from_dlpack(given, device=embedded, copy=False),
    ):
        with pytest.raises(ValueError, match=r"can't alias|without copying"):
            aliased()


def test_other_memory_interfaces_raise_as_on_cpu(embedded):
    x = numbers(embedded, 3)
    assert not hasattr(x, "__cuda_array_interface__")
    assert x.share_memory_() is x
    assert x.is_shared()  # as memory of CUDA: it need not be moved to be sent
    with pytest.raises(RuntimeError, match="only"):
        x.pin_memory()


MISTAKES = {
    "bool of many": lambda d: bool(numbers(d, 2)),
    "bool of none": lambda d: bool(numbers(d, 0)),
    "item of many": lambda d: numbers(d, 2).item(),
    "float of many": lambda d: float(numbers(d, 2)),
    "length of a number": lambda d: len(torch.tensor(1.0, device=d)),
    "iteration over a number": lambda d: list(torch.tensor(1.0, device=d)),
    "fraction as index": lambda d: [1, 2][numbers(d, 2)[1]],
    "among others": lambda d: numbers(d, 3) in (numbers(d, 3) + 1, None),
    "format": lambda d: f"{numbers(d, 3):.2f}",
    "no such device": lambda d: numbers(d, 3).to("nonsense"),
    "cuda": lambda d: numbers(d, 3).cuda(),
    "not close": lambda d: torch.testing.assert_close(numbers(d, 3), numbers(d, 3) + 1),
    "another device": lambda d: torch.testing.assert_close(numbers(d, 3), numbers("meta" if d == "cpu" else "cpu", 3)),
    "aliasing a list": lambda d: torch.asarray([1.0, 2.0], device=d, copy=False),
    "no such attribute": lambda d: numbers(d, 3).nope,
}


@pytest.mark.parametrize("what", MISTAKES)
def test_python_conversion_error_equals_cpu(embedded, what):
    def wrong(d):
        MISTAKES[what](d)

    assert_same_error(wrong)


@pytest.mark.parametrize("case", CASES, ids=lambda function: function.__name__)
def test_python_conversion_equals_cpu(embedded, case):
    assert_same_as_cpu(case)


class WrapperTensor(torch.Tensor):
    """A library's tensor class that wraps another tensor and sees each op."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = pytree.tree_map_only(WrapperTensor, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def test_op_with_tensor_subclass_uses_its_override(embedded):
    table, rows = torch.arange(8.0).view(4, 2), torch.tensor([2, 0])
    remote, wrapped = table.to(embedded), WrapperTensor(rows.to(embedded))
    assert torch.equal(remote.index_select(0, wrapped).cpu(), table[rows])
    assert torch.equal((remote[:2] + wrapped).cpu(), table[:2] + rows)
    remote.index_copy_(0, wrapped, remote[:2] + 1)
    assert torch.equal(remote.cpu(), table.index_copy(0, rows, table[:2] + 1))


def test_list_as_tensor_argument_raises(embedded):
    tensors = [torch.ones(3, device=embedded)] * 1_000
    djinn.reset_stats()
    with pytest.raises(RuntimeError, match="instead found type 'list'"):
        torch.ops.aten.sin.default(tensors)
    assert djinn.stats()["submissions"] == 1
    assert repr(tensors[:2]) == f"[{tensors[0]!r}, {tensors[0]!r}]"
    assert "tensor([1., 1., 1.]" in repr(tensors[0])
