"""Results of pointwise ops that a trial of the CPU's kernel tells are those that the CPU returns for the tensors themselves."""

from __future__ import annotations

import threading

import pytest
import torch

from djinn_client.interception.dispatch import slots_of
from djinn_client.interception.shape_inference import meta_infer
from djinn_client.interception.shape_inference.trials import is_pointwise, pointwise_result
from djinn_core.ir.operators import allowed_operators, resolve
from djinn_core.ir.values import meta_of
from djinn_core.torch_private import schema_of

DEVICE = "remote_accelerator:0"
SHAPES = [(3, 4), (1, 4), (3, 1), (1, 1), (4,), (2, 1, 4), ()]
DTYPES = [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64]
NUMBERS = {"number": 1, "float": 0.5, "int": 1, "bool": True}


@pytest.fixture(autouse=True)
def session(embedded):
    torch.ones(1, device=DEVICE).cpu()


def pointwise_ops():
    for name in sorted(allowed_operators()):
        if name.startswith("aten::") and is_pointwise(resolve(name)):
            yield resolve(name)


def arguments(func, tensors):
    """Return positional arguments that the schema requires, or None if this test cannot make a required kind."""
    made = []
    for argument in schema_of(func).arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            made.append(next(tensors))
        elif argument.has_default_value() or argument.kwarg_only:
            break
        elif kind in NUMBERS:
            made.append(NUMBERS[kind])
        else:
            return None
    return made


def test_trial_metadata_equals_cpu():
    compared = 0
    for dtype in DTYPES:
        here = {shape: torch.ones(shape, dtype=dtype) for shape in SHAPES}
        there = {shape: tensor.to(DEVICE) for shape, tensor in here.items()}
        pairs = [((3, 4), shape) for shape in SHAPES] + [(shape, (3, 4)) for shape in SHAPES]
        for number, func in enumerate(pointwise_ops()):
            for first, second in pairs[number % 4 :: 4]:
                shapes = [first, *[second] * 4]
                remote = arguments(func, (there[shape] for shape in shapes))
                told = pointwise_result(func, remote, {}, 0) if remote else None
                if told is not None:
                    given = arguments(func, (here[shape] for shape in shapes))
                    assert told.meta is meta_of(func(*given)), (func, dtype, first, second)
                    here[first].fill_(1)  # it may have been written
                    compared += 1
    assert compared > 1000


@pytest.mark.parametrize("out", [(3, 4), (0,), (0, 5)])
def test_out_tensor_takes_result(out, monkeypatch):
    """The inferred call equals the meta kernel's."""
    given = (torch.ones(3, 4, device=DEVICE), torch.ones(4, dtype=torch.int64, device=DEVICE))
    target = torch.empty(out, device=DEVICE)
    call = meta_infer.infer(torch.ops.aten.add.out, given, {"out": target}, 0)
    monkeypatch.setattr(meta_infer, "pointwise_result", lambda *_: None)
    by_kernel = meta_infer.infer(torch.ops.aten.add.out, given, {"out": target}, 0)
    for name in ("signature", "operands", "results", "aliases", "inplace", "writes", "changes", "new_count", "kind"):
        assert getattr(call, name) == getattr(by_kernel, name), name
    assert slots_of(given, {"out": target}) == ()


def test_trial_errors_equal_cpu():
    def errors_on(device):
        x, whole = torch.ones(3, 4, device=device), torch.ones(3, 4, dtype=torch.int64, device=device)
        for call in (
            lambda: whole.add_(0.5),
            lambda: torch.ones(1, 4, device=device).add_(x),
            lambda: torch.sub(x > 0, x > 0),
            lambda: torch.add(x, x, out=torch.empty(3, 4, dtype=torch.int64, device=device)),
        ):
            with pytest.raises(RuntimeError) as raised:
                call()
            yield type(raised.value), str(raised.value).split("\n")[0]

    assert list(errors_on(DEVICE)) == list(errors_on("cpu"))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):  # where its value is wanted, if its signature is known
        torch.ones(3, 4, dtype=torch.int64, device=DEVICE).remainder(0).cpu()


def test_out_tensor_is_returned_after_aliased_call():
    x = torch.ones(3, 4, device=DEVICE)
    assert torch.neg(x, out=x) is x
    other = x[:]
    assert torch.neg(x, out=other) is other


def test_mismatched_gradient_shape_raises_at_op():
    """A trial with one element would accept the shape."""
    x = torch.ones(3, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match="same shape"):
        torch.ops.aten.gelu_backward(x[0], x)
    assert torch.equal((x + 1).cpu(), torch.full((3, 4), 2.0))


def test_trials_do_not_advance_cpu_generator(embedded):
    """Another thread draws each number once while small tensors are tried."""
    drawn, ended = [], threading.Event()

    def draw():
        while not ended.is_set():
            drawn.append(torch.rand((), dtype=torch.float64).item())

    thread = threading.Thread(target=draw)
    thread.start()
    for number in range(300):
        torch.ones(2, device=embedded).uniform_(0, number + 1.5)
        torch.ones(2, device=embedded).exponential_(number + 0.1)
    ended.set()
    thread.join()
    assert len(set(drawn)) == len(drawn) > 300
