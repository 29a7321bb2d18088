"""No op returns freed memory of the executor: unwritten bytes of results are zero."""

from __future__ import annotations

import ctypes
import platform
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from configured import configured
from torch.utils._pytree import tree_leaves, tree_map

from djinn_core import torch_private
from djinn_core.ir.operators import resolve
from djinn_layouts.operator_library import LayoutCalls
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.running.device_time import DeviceTimer
from djinn_server.running.own_operators import own_operators
from djinn_server.running.random_state import DeviceRandomness
from djinn_server.running.uninitialized_memory import copy_with_strides, needs_zero_fill, zero_filling
from djinn_server.system.memory import resident, zero_fill
from djinn_strategies.compiling.compiled_region import CompiledRegion
from evaluation.fuzz.real_calls import database_calls

pytestmark = pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="glibc alone fills what it hands out")
REMOTE = "remote_accelerator:0"
M_PERTURB = -6


@pytest.fixture
def fill_allocations():
    """Return a function that runs a function while glibc fills each allocation with a byte."""
    mallopt = ctypes.CDLL(None).mallopt

    def run(byte, function):
        mallopt(M_PERTURB, byte ^ 0xFF)
        try:
            return function()
        finally:
            mallopt(M_PERTURB, 0)

    return run


def storage_bytes(tensor):
    """Return all bytes of a tensor's storage, including gaps between elements."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def function_of(name):
    """Return the function that an executor calls for an op."""
    return zero_filling(name, torch_private.kernel_of(resolve(name)))


def copy_with_storage(value):
    """Copy a tensor with its storage size, strides and offset."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(0, dtype=value.dtype).set_(
        value.untyped_storage().clone(), value.storage_offset(), value.shape, value.stride()
    )


def bytes_after(name, args, kwargs):
    """Run an op. Return the storage bytes of its results and operands."""
    args, kwargs = tree_map(copy_with_storage, (args, kwargs))
    torch.manual_seed(0)
    made = function_of(name)(*args, **kwargs)
    return [storage_bytes(t).clone() for t in tree_leaves((made, args, kwargs)) if isinstance(t, torch.Tensor)]


LOG_PROBABILITIES = torch.rand(10, 3, 5).log()
AT_AN_OFFSET = torch.zeros(64).as_strided((0,), (1,), 50)
GROWING = torch.zeros(4).as_strided((0,), (1,), 1000)
PARTLY_WRITTEN = {
    "aten::_ctc_loss": ((LOG_PROBABILITIES, torch.ones(3, 4, dtype=torch.long), [5, 10, 7], [2, 4, 1]), {}),
    "aten::linalg_lstsq": ((torch.rand(30, 2), torch.rand(30, 9)), {}),
    "aten::resize": ((torch.ones(2), [900]), {}),
    "aten::resize_": ((torch.ones(2), [900]), {}),
    "aten::resize_as_": ((torch.ones(2), torch.ones(900)), {}),
    "aten::set_.source_Tensor_storage_offset": ((torch.ones(2), torch.ones(3), 200, [400]), {}),
    "aten::add.out": ((torch.ones(3), torch.ones(3)), {"out": GROWING}),
    "aten::mm.out": ((torch.ones(30, 2), torch.ones(2, 30)), {"out": AT_AN_OFFSET}),
    "aten::empty.out": (([900],), {"out": torch.ones(2)}),
    "aten::empty_like.out": ((torch.ones(900),), {"out": torch.ones(2)}),
    "aten::empty.memory_format": (([9, 300],), {}),
    "aten::empty_like": ((torch.ones(900),), {}),
    "aten::empty_permuted": (([3, 400, 5], [2, 0, 1]), {}),
    "aten::empty_strided": (([30, 20], [100, 3]), {}),
    "aten::new_empty": ((torch.ones(2), [900]), {}),
    "aten::new_empty_strided": ((torch.ones(2), [30, 20], [100, 3]), {}),
}


@pytest.mark.parametrize("name", PARTLY_WRITTEN)
def test_unwritten_bytes_of_results_are_zero(name, fill_allocations):
    args, kwargs = PARTLY_WRITTEN[name]
    zeros, others = (fill_allocations(byte, partial(bytes_after, name, args, kwargs)) for byte in (0, 165))
    assert all(map(torch.equal, zeros, others))


ROWS, IMAGES, WEIGHT = torch.rand(7, 33), torch.rand(3, 6, 5, 9), torch.rand(6)
LAYOUTS = (
    lambda x: x,
    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    lambda x: x[..., ::2],
    lambda x: x[:0],
)
COMPOSITES = {
    "aten::layer_norm": lambda layout: [(x, [x.shape[-1]], torch.rand(x.shape[-1]), None) for x in (layout(ROWS), layout(IMAGES))],
    "aten::rms_norm": lambda layout: [(x, [x.shape[-1]]) for x in (layout(ROWS), layout(IMAGES))],
    "aten::group_norm": lambda layout: [(layout(IMAGES), 3, WEIGHT, WEIGHT)],
    "aten::batch_norm": lambda layout: [(layout(IMAGES), WEIGHT, None, WEIGHT, WEIGHT, training, 0.1, 1e-5, False) for training in (False, True)],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "permuted", "strided", "empty"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_norms_write_every_byte_without_zero_fill(name, layout, fill_allocations):
    assert not needs_zero_fill(name)
    for args in COMPOSITES[name](layout):
        zeros, others = (fill_allocations(byte, partial(bytes_after, name, args, {})) for byte in (0, 165))
        assert all(map(torch.equal, zeros, others))


@pytest.mark.parametrize(
    ("name", "args", "memory_format"),
    [
        ("aten::resize_", (torch.ones(2), [900]), torch.preserve_format),
        ("aten::resize_", (torch.ones(2), [900]), torch.channels_last),
        ("aten::resize_as_", (torch.ones(2), torch.ones(900)), torch.channels_last),
    ],
)
def test_storage_that_has_grown_when_its_op_raises_is_zero(name, args, memory_format, fill_allocations):
    operand = copy_with_storage(args[0])

    def run():
        with pytest.raises(RuntimeError, match="format"):
            function_of(name)(operand, *args[1:], memory_format=memory_format)

    fill_allocations(165, run)
    assert len(storage_bytes(operand)) == 3600
    assert not storage_bytes(operand)[8:].any()


def test_deterministic_fill_zero_fills_gaps(fill_allocations):
    torch._C._set_deterministic_algorithms(True)  # the public function imports half of the compiler
    try:
        made = fill_allocations(165, lambda: function_of("aten::empty_strided")([30, 20], [100, 3]))
    finally:
        torch._C._set_deterministic_algorithms(False)
    gaps = storage_bytes(made).view(torch.float32).clone()
    gaps.as_strided(made.shape, made.stride()).zero_()
    assert made.isnan().all()
    assert not gaps.any()


def test_copy_with_strides_zero_fills_gaps(fill_allocations):
    made = fill_allocations(165, lambda: copy_with_strides(torch.ones(30, 20), (100, 3)))
    assert storage_bytes(made).view(torch.float32).sum() == made.sum() == 600


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_layout_calls_are_zero_filled(fill_allocations):
    randomness = DeviceRandomness(torch.device("cpu"))
    own = own_operators(CpuRuntime(), DeviceTimer(CpuRuntime()), randomness, [LayoutCalls()])
    call = own["djinn::layout_call"]
    columns = torch.cat([torch.arange(2), torch.arange(298)])
    csr = ["sparse_csr", [2, 300], torch.tensor([0, 2, 300]), columns, torch.ones(300)]
    zeros, others = (fill_allocations(byte, lambda: call("aten::empty_like", csr)) for byte in (0, 165))
    assert all(torch.equal(storage_bytes(a), storage_bytes(b)) for a, b in zip(zeros, others, strict=True))


@pytest.mark.parametrize("op", ["aten::empty.memory_format", "aten::_ctc_loss"])
def test_compiled_region_with_uninitialized_ops_is_zero_filled(op, fill_allocations):
    """The stub replay allocates an uninitialized buffer. The stub region has this op only."""
    template = SimpleNamespace(steps=[SimpleNamespace(op=op)], constants=(), slots=0)
    region = SimpleNamespace(start=0, stop=1, inputs=(0,), views=(), owned_results=(0,), written=())
    sizes = SimpleNamespace(float_slots=(), guard=lambda: None)
    compiled = CompiledRegion("fake", lambda _: [torch.empty(900)], template, region, sizes, lambda data: data)
    env = [torch.ones(1)]
    fill_allocations(165, lambda: compiled.run(env))
    assert not storage_bytes(env[0]).any()


@pytest.mark.long
def test_ops_without_zero_fill_write_every_byte(fill_allocations):
    """Uses sample calls of PyTorch's operator database."""
    calls = database_calls()
    checked = 0
    for name, kept in calls.items():
        try:
            if needs_zero_fill(name):
                continue
        except Exception:  # no program may contain it
            continue
        for args, kwargs in kept:
            zeros, others = (fill_allocations(byte, partial(bytes_after, name, args, kwargs)) for byte in (0, 165))
            assert all(map(torch.equal, zeros, others)), name
            checked += 1
    assert checked > 1000


def test_zero_fill_leaves_large_blocks_untouched():
    meter = resident()
    before = meter.now()
    made = function_of("aten::empty.memory_format")([4 << 30], dtype=torch.uint8)
    grown = function_of("aten::resize_")(torch.ones(3), [1 << 30])
    assert meter.now() - before < 64 << 20
    meter.close()
    assert not made[:: 1 << 20].any()
    assert not grown[3 :: 1 << 18].any()


@pytest.mark.parametrize("size", [1, 4095, 4096, 12_289, (4 << 20) + 5, 40 << 20])
@pytest.mark.parametrize("start", [0, 1, 4096])
def test_zero_fill_writes_exactly_the_given_bytes(size, start):
    memory = torch.full((size + start + 64,), 7, dtype=torch.uint8)
    zero_fill(memory.data_ptr() + start, size)
    assert not memory[start : start + size].any()
    assert (memory[:start] == 7).all()
    assert (memory[start + size :] == 7).all()


DTYPES = (torch.uint8, torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64)
SIZES = (1, 3, 8, 17, 64, 100, 513, 4096, 5000, 40_000)
KINDS = (
    lambda n, dtype: torch.empty(n, dtype=dtype, device=REMOTE),
    lambda n, dtype: torch.empty_like(torch.empty(n, dtype=dtype, device="meta"), device=REMOTE),
    lambda n, dtype: torch.ones(1, device=REMOTE).new_empty(n, dtype=dtype),
    lambda n, dtype: torch.empty_permuted((2, n), (1, 0), dtype=dtype, device=REMOTE),
    lambda n, dtype: torch.empty_strided((2, n), (3 * n, 2), dtype=dtype, device=REMOTE),
    lambda n, dtype: torch.zeros(1, dtype=dtype, device=REMOTE).resize_(n),
    lambda n, dtype: torch.zeros(1, dtype=dtype).to(REMOTE).resize_(n),  # what was sent is moved before it can grow
    lambda n, dtype: torch.add(
        torch.zeros(3, device=REMOTE),
        0,
        out=torch.zeros(0, device=REMOTE).as_strided((0,), (1,), n),
    ),
)


def test_uninitialized_tensors_of_an_executor_are_zero(monkeypatch):
    monkeypatch.setenv("MALLOC_PERTURB_", "165")
    with configured(strict=False):
        counts = []
        for number in range(10_000):
            size, dtype, kind = SIZES[number % 10], DTYPES[number % 6], KINDS[number % 8]
            made = kind(size, dtype)
            memory = torch.empty(0, dtype=torch.uint8, device=REMOTE).set_(made.untyped_storage())
            counts.append(memory.count_nonzero())
            if len(counts) == 500:
                assert not torch.stack(counts).cpu().any()
                counts.clear()
