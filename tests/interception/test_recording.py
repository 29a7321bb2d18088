"""Recording, counted: calls that need no instruction, the numbers of known calls, the memory that it takes."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch

import djinn
from djinn_client.interception.recording.entry import Entry
from djinn_client.interception.recording.recorder import Recorder, SyncRequest, current, recorders
from djinn_client.interception.runtime_interface import Port, port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.storage import Storage, Value
from djinn_client.torch_dispatch import without_modes
from djinn_core.ir.program import Call
from djinn_core.ir.values import TensorMeta

DEVICE = "remote_accelerator:0"
INSTRUCTION_BYTES = 300  # of one recorded instruction, without the tensors that it made
TRACKED = 4  # objects of an op that the garbage collector looks at: its tensor, the attributes and the value of that, its handles


def count_recorded_ops(run):
    """Return the number of instructions that `run` records."""
    current().flush()
    before = len(current().entries)
    kept = run()
    count = len(current().entries) - before
    del kept
    return count


SAME = {
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "a view of the same shape": lambda x: x.view(2, 3),
    "expanded to its size": lambda x: x.expand(2, 3),
    "all of it": lambda x: x[:],
    "a reshape with nothing to do": lambda x: x.reshape(2, 3),
    "made contiguous": lambda x: x.contiguous(),
    "no dropout": lambda x: torch.dropout(x, 0.5, train=False),
    "moved where it is": lambda x: x.to(DEVICE),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("inference", [False, True])
def test_identity_op_is_not_recorded(embedded, name, inference):
    with torch.inference_mode(inference):
        x = torch.arange(6.0, device=DEVICE).view(2, 3)
        for _ in range(2):
            assert count_recorded_ops(lambda: SAME[name](x)) == 0
        again = SAME[name](x)
        assert again.is_inference() == x.is_inference()
        x.add_(1)
    assert torch.equal(again.cpu(), torch.arange(6.0).view(2, 3) + 1)


def transpose_alias(d):
    x = torch.arange(6.0, device=d).view(2, 3)
    y, z = x.detach(), x.view(2, 3)
    x.t_()
    return x, y, z.add_(1)


def resize_alias(d):
    x = torch.arange(6.0, device=d)
    y = x.detach()
    y.resize_(10).zero_()
    return x.add_(1), y[:6]


def transpose_after_data_assignment(d):
    x, y = torch.zeros(2, 3, device=d), torch.ones(2, 3, device=d)
    x.data = y
    y.t_()
    return x.mul_(3), y


def nonzero_into_alias(d):
    x, out = torch.tensor([3, 0, 4], device=d), torch.empty(0, 1, dtype=torch.int64, device=d)
    before = out.detach()
    torch.nonzero(x, out=out)
    return out, before


@pytest.mark.parametrize(
    "program", [transpose_alias, resize_alias, transpose_after_data_assignment, nonzero_into_alias]
)
def test_aliases_of_value_separate_on_metadata_change(embedded, program):
    for there, here in zip(program(DEVICE), program("cpu"), strict=True):
        assert (there.shape, there.stride()) == (here.shape, here.stride())
        assert torch.equal(there.cpu(), here)


def test_known_call_uses_given_scalar(embedded):
    x = torch.ones(3, device=DEVICE)
    for number in (0.0, -0.0, 0, 1, 1.0, True, 2.5, float("inf")):
        for _ in range(2):
            assert torch.equal(torch.copysign(x, number).cpu(), torch.copysign(torch.ones(3), number))
            assert torch.equal((x * number).cpu(), torch.ones(3) * number)
            in_tensor = torch.tensor(number, dtype=torch.float32, device="cpu")
            assert torch.equal(torch.copysign(x, in_tensor).cpu(), torch.copysign(torch.ones(3), in_tensor))
    assert [x.view(n, -1).shape for n in (1, 3, 1)] == [(1, 3), (3, 1), (1, 3)]
    for part in (0.0, -0.0):
        z = torch.full((1,), complex(1, part), dtype=torch.complex64, device=DEVICE)
        assert torch.equal(
            torch.copysign(x, torch.view_as_real(z)[0, 1]).cpu().sign(), torch.ones(3).copysign(torch.tensor(part))
        )


def test_op_adds_few_gc_objects(embedded):
    x = torch.arange(6.0, device=DEVICE)
    kept = [x + x for _ in range(300)]
    current().flush()
    before = len(gc.get_objects())
    gc.disable()
    try:
        kept += [x + x for _ in range(200)]
        made = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert made <= (TRACKED + 0.5) * 200, made


@without_modes
def test_recorded_instruction_memory_is_bounded(embedded):
    recorder, rounds = current(), 500

    def record(x):
        for _ in range(rounds):
            y = torch.mm(x, x).view(2, 8) * 0.5
            y.add_(1.0)

    with torch.no_grad():
        x = torch.zeros(4, 4, device=DEVICE)
        record(x)
        recorder.flush()
        limit, recorder.limit = recorder.limit, 10**9
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            record(x)
            after, _ = tracemalloc.get_traced_memory()
            count = len(recorder.entries)
        finally:
            tracemalloc.stop()
            gc.enable()
            recorder.take(SyncRequest())  # and send it not
            recorder.limit = limit
    assert count == rounds * 4
    assert (after - before) / count < INSTRUCTION_BYTES


def layer(name):
    torch.manual_seed(0)
    return {
        "lstm": lambda: torch.nn.LSTM(4, 6, 2, bidirectional=True),
        "lstm, batch first": lambda: torch.nn.LSTM(4, 6, batch_first=True),
        "gru": lambda: torch.nn.GRU(4, 6),
        "rnn": lambda: torch.nn.RNN(4, 6),
        "batch norm": lambda: torch.nn.BatchNorm1d(5),
        "rms norm": lambda: torch.nn.RMSNorm(4),
    }[name]()


LAYERS = ("lstm", "lstm, batch first", "gru", "rnn", "batch norm", "rms norm")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_eval_layer_is_one_instruction(embedded, name, mode):
    local = layer(name).eval()
    remote = layer(name).eval().to(DEVICE)
    states = 2 if "lstm" in name or name in {"gru", "rnn"} else 0  # zeros to start from
    for length in (3, 40):
        x = torch.linspace(-1, 1, length * 20).view(length, 5, 4)
        with mode():
            far = x.to(DEVICE)
            assert count_recorded_ops(lambda far=far: remote(far)) <= 1 + states
            there, here = remote(far), local(x)
        for a, b in zip(leaves(there), leaves(here), strict=True):
            assert torch.equal(a.cpu(), b)
            assert a.stride() == b.stride()


@pytest.mark.parametrize("make", [lambda: torch.nn.BatchNorm1d(5), lambda: torch.nn.GRU(4, 6, 2, dropout=0.5)])
def test_training_layers_record_writes_and_draws(embedded, make):
    remote, x = make().train().to(DEVICE), torch.zeros(3, 5, 4, device=DEVICE)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert count_recorded_ops(lambda: remote(x)) >= 3


def leaves(value):
    return [value] if isinstance(value, torch.Tensor) else [leaf for part in value for leaf in leaves(part)]


def test_factories_are_one_instruction(embedded):
    for make in (lambda: torch.zeros(2, 3, device=DEVICE), lambda: torch.ones((), dtype=torch.int8, device=DEVICE)):
        assert count_recorded_ops(make) == 1
    made = (
        torch.scalar_tensor(2, device=DEVICE),
        torch.zeros(2, dtype=torch.bool, device=DEVICE),
        torch.ones(3, device=DEVICE),
    )
    wanted = torch.scalar_tensor(2), torch.zeros(2, dtype=torch.bool), torch.ones(3)
    assert [(t.dtype, t.tolist()) for t in made] == [(t.dtype, t.tolist()) for t in wanted]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "look", [lambda x: x, lambda x: x[:1].expand(7, 5), lambda x: x.t()], ids=["whole", "expanded", "t"]
)
def test_scalar_times_narrow_dtype_needs_no_round_trip(embedded, dtype, look):
    here = torch.ones(7, 5, dtype=dtype)
    there = here.to(embedded)
    djinn.synchronize()
    before = djinn.stats()["round_trips"]
    found = look(there) * 0.35
    assert djinn.stats()["round_trips"] == before
    expected = look(here) * 0.35
    assert found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(
    "kind", [Call, Entry, LazyTensor, Port, Recorder, Storage, TensorMeta, Value], ids=lambda k: k.__name__
)
def test_recording_classes_have_no_getattr(kind):
    """A cached property in a class with slots adds `__getattr__`, which slows down each attribute access."""
    assert not any({"__getattr__", "__getattribute__"} & vars(base).keys() for base in kind.__mro__[:-1])


def test_lower_recording_limit_applies_to_current_program(embedded, monkeypatch):
    x, recorder = torch.zeros(2, device=DEVICE), current()
    recorder.flush()
    for _ in range(30):
        x = x + 1
    assert recorder.unsent == 30
    monkeypatch.setattr(port, "checkpoint_instructions", 20)
    recorders.limit_programs()
    x = x + 1
    assert recorder.unsent < 20
    assert x.tolist() == [31, 31]
