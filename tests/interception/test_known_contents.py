"""Numbers that the client knows: no executor is asked for them, until what they come of is written."""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import djinn
from djinn_client.interception import dispatch
from djinn_client.interception.native.library import ops
from djinn_integrations.dynamo.recorded_call import record_call

DEVICE = "remote_accelerator:0"
BUDGET, DEEPEST = 1 << 24, 32  # as in known.cpp


@pytest.fixture(autouse=True)
def session(embedded):
    torch.ones(1, device=DEVICE).cpu()


def count_waits(run):
    """Return the result of `run`, and the number of round trips that it waits for."""
    before = djinn.stats()["round_trips"]
    return run(), djinn.stats()["round_trips"] - before


def mask():
    return torch.tensor([[1, 1, 0], [1, 1, 1]]).to(DEVICE)


KNOWN = {
    "uploaded": lambda: mask()[0, 2].item() == 0,
    "made of a list": lambda: torch.tensor([3, 4], device=DEVICE)[1].item() == 4,
    "a small float": lambda: torch.tensor([0.1], device=DEVICE).item() == torch.tensor([0.1]).item(),
    "made there": lambda: torch.arange(5, device=DEVICE)[-1].item() == 4,
    "full": lambda: torch.full((2, 2), 7, device=DEVICE).sum().item() == 28,
    "all of a mask": lambda: not bool(mask().all()),
    "as transformers asks": lambda: not bool(mask().bool().sum() == mask().numel()),
    "padding": lambda: bool(torch.isin(mask(), torch.tensor([0], device=DEVICE)).any()),
    "transposed": lambda: mask().t()[2].sum().item() == 1,
    "another dtype": lambda: mask().view(torch.int32)[0, 0].item() == 1,
    "a mask of floats": lambda: bool(torch.ones(2, 3, device=DEVICE).bool().all()),
    "compared floats": lambda: bool((torch.tensor([0.5, 2.0], device=DEVICE) > 0).all()),
    "a list": lambda: mask().sum(-1).tolist() == [2, 3],
    "places": lambda: (mask() == 0).nonzero().tolist() == [[0, 2]],
    "size under a mask": lambda: torch.zeros(2, 3, 4, device=DEVICE)[mask() == 1].shape == (5, 4),
    "size behind a slice": lambda: torch.zeros(4, 2, 3, device=DEVICE)[:, mask() == 1].shape == (4, 5),
    "columns by index": lambda: mask()[:, torch.arange(2, device=DEVICE) + 1].sum().item() == 3,
    "a filled number": lambda: torch.zeros((), device=DEVICE).fill_(2).item() == 2,
    "counted in place": lambda: torch.zeros((), dtype=torch.int64, device=DEVICE).add_(2).mul_(3).item() == 6,
}


@pytest.mark.parametrize("program", KNOWN.values(), ids=KNOWN)
def test_known_contents_need_no_fetch(program):
    assert count_waits(program) == (True, 0)


def test_growing_mask_stays_known():
    def program():
        grown, found = torch.ones(2, 3, dtype=torch.int64, device=DEVICE), []
        for _ in range(100):
            grown = torch.cat([grown, grown.new_ones((2, 1))], dim=-1)
            found.append(bool(grown.bool().sum() == grown.numel()))
        return all(found)

    assert count_waits(program) == (True, 0)


def test_float_results_are_fetched():
    assert count_waits(lambda: (torch.tensor([0.5, 2.0], device=DEVICE) * 3).sum().item()) == (7.5, 1)


def test_indexing_with_known_mask_needs_no_fetch():
    x, mask_here = torch.arange(24.0).reshape(2, 3, 4), mask().cpu() == 1
    there = x.to(DEVICE).requires_grad_()
    found = there[mask() == 1]
    assert torch.equal(found.detach().cpu(), x[mask_here])
    found.sum().backward()
    assert torch.equal(there.grad.cpu()[..., 0], mask_here.float())


@pytest.mark.parametrize("shape", [(3, 3), (2, 2), (2, 3, 5)])
def test_known_mask_of_wrong_shape_raises(shape):
    with pytest.raises(IndexError, match="The shape of the mask"):
        torch.zeros(2, 3, 4, device=DEVICE)[torch.ones(shape, dtype=torch.bool, device=DEVICE)].cpu()


@pytest.mark.parametrize("number", [1.0, float("inf"), float("nan")])
def test_nan_check_of_loss_fetches_once(number):
    def program():
        loss = torch.tensor([number], device=DEVICE).sum()
        return bool(torch.isnan(loss) or torch.isinf(loss)), str(loss.item())

    assert count_waits(program) == ((number != 1.0, str(number)), 1)


def test_written_loss_is_fetched_again():
    loss = torch.tensor([2.0], device=DEVICE).sum()
    before = torch.isnan(loss)
    loss.mul_(float("nan"))
    after = torch.isnan(loss)
    loss.zero_()
    assert (bool(before), bool(after), loss.item()) == (False, True, 0.0)


def write_through_storage(x):
    x.untyped_storage().fill_(0)


def write_in_another_thread(x):
    thread = threading.Thread(target=x.zero_)
    thread.start()
    thread.join()


WRITES = {
    "index": lambda x: x.__setitem__((0, 0), 0),
    "a view": lambda x: x[0].view(-1)[:1].fill_(0),
    "copy_": lambda x: x.copy_(torch.zeros_like(x)),
    "from the CPU": lambda x: x.copy_(torch.zeros(2, 3, dtype=torch.int64)),
    "foreach": lambda x: torch._foreach_zero_([x]),
    "out=": lambda x: torch.mul(x, 0, out=x),
    "data": lambda x: setattr(x, "data", torch.zeros_like(x)),
    "scatter": lambda x: x.scatter_(0, torch.zeros(1, 3, dtype=torch.int64, device=DEVICE), 0),
    "storage": write_through_storage,
    "another thread": write_in_another_thread,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_write_drops_known_contents(write):
    x = mask()
    assert x[0, 0].item() == 1
    before = x + 1  # of what was there
    write(x)
    assert x[0, 0].item() == 0
    assert (int(before[0, 0]), int((x + 1)[0, 0])) == (2, 1)


def test_write_of_other_thread_drops_known_contents(monkeypatch):
    """The other thread writes after Python records the first write and before C++ stores its result."""
    plain = dispatch.append

    def written_after(*args, **kwargs):
        monkeypatch.undo()
        made = plain(*args, **kwargs)
        thread = threading.Thread(target=x.mul_, args=(5,))
        thread.start()
        thread.join()
        return made

    for write in (lambda x: x.add_(1), lambda x: x.fill_(1)):
        x = torch.zeros((), dtype=torch.int64, device=DEVICE)
        dispatch.forget_calls()  # so that Python records the write
        monkeypatch.setattr(dispatch, "append", written_after)
        write(x)
        assert dispatch.append is plain
        assert x.item() == 5


def test_resized_tensor_has_no_known_contents():
    x = mask()
    x.resize_(4, 3)
    assert x[0].tolist() == [1, 1, 0]
    assert x.sum().item() is not None  # whatever lies in the new rows


def test_random_integer_programs_equal_cpu():
    ops = (
        lambda a, b: a + b,
        lambda a, b: a * 3 - b,
        lambda a, b: torch.cat([a, b])[::2],
        lambda a, b: torch.where(a > b, a, b),
        lambda a, b: a.masked_fill(b == a, 5),
        lambda a, b: (a >= b).to(torch.int64),
        lambda a, b: a.flip(0).cumsum(0),
        lambda a, b: a.mul_(2),
        lambda a, b: a.clone().add_(b),
        lambda a, b: torch.stack([a, b]).amax(0),
        lambda a, b: torch.full_like(a, 9),
        lambda a, b: a.new_zeros(4) + b,
    )
    chosen = random.Random(0)
    for _ in range(40):
        here = [torch.tensor([chosen.randrange(-9, 9) for _ in range(4)]) for _ in range(2)]
        there = [t.to(DEVICE) for t in here]
        for _ in range(6):
            op, (i, j) = chosen.choice(ops), chosen.choices(range(len(here)), k=2)
            here.append(op(here[i], here[j]))
            there.append(op(there[i], there[j]))
            number = there[-1].sum().item()
            assert number == here[-1].sum().item()
        assert [t.cpu().tolist() for t in there] == [t.tolist() for t in here]


def test_recorded_call_ignores_known_contents():
    @torch.compile(backend="djinn")
    def branching(x):
        return x + 1 if bool(x.all()) else x - 1

    ones, zeros = torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for given in (ones, zeros, ones, zeros, ones):
        assert branching(given.to(DEVICE)).tolist() == branching.__wrapped__(given).tolist()


def test_oldest_contents_are_evicted():
    ops.limit_known(64 * 1024)
    try:
        old = mask()
        others = [torch.zeros(1000, dtype=torch.int64).to(DEVICE) for _ in range(20)]
        assert count_waits(old[0, 0].item) == (1, 1)
        assert count_waits(others[-1][0].item) == (0, 0)
        assert ops.limit_known(64 * 1024) <= 64 * 1024
    finally:
        ops.limit_known(BUDGET)


@pytest.mark.parametrize("dtype", [torch.bits8, torch.uint16, torch.float8_e4m3fn, torch.complex64])
def test_contents_of_other_dtypes_are_uploaded(dtype):
    here = torch.arange(16, dtype=torch.uint8).view(dtype)
    assert torch.equal(here.to(DEVICE).cpu().view(torch.uint8), here.view(torch.uint8))


def test_unread_long_chains_are_dropped():
    x = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(DEEPEST):  # `zeros` is the first of the chain
        x = x + 1
    assert count_waits(x.item) == (DEEPEST, 1)
    y = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(DEEPEST - 1):
        y = y + 1
    assert count_waits(y.item) == (DEEPEST - 1, 0)


def test_known_op_is_folded_in_cpp():
    given = mask()

    def program():
        grown = torch.cat([given, torch.ones(2, 1, dtype=torch.int64, device=DEVICE)], dim=-1)
        counted = torch.arange(4, device=DEVICE) + torch.full((4,), 2, device=DEVICE)
        grown.add_(counted).fill_(3)
        return torch.isin(grown * 2, torch.zeros_like(counted))

    program(), program()
    before = ops.count()[2]
    made = program()
    assert ops.count()[2] == before
    assert count_waits(lambda: made.any().item()) == (False, 0)


def test_folding_keeps_kernel_errors():
    with pytest.raises(RuntimeError, match=r"numel|reduction"):
        torch.zeros(0, dtype=torch.int64, device=DEVICE).max().item()


def test_concurrent_reads_of_known_number():
    count = 4
    barrier, switching = threading.Barrier(count), sys.getswitchinterval()

    def read_number(x):
        barrier.wait(60)
        return x.item()

    def program():
        with ThreadPoolExecutor(count) as threads:
            return [list(threads.map(read_number, [(mask() * number).sum()] * count)) for number in range(30)]

    sys.setswitchinterval(1e-6)
    try:
        assert count_waits(program) == ([[5 * number] * count for number in range(30)], 0)
    finally:
        sys.setswitchinterval(switching)


def test_dispatch_mode_sees_folded_ops():
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops.append(func)
            return func(*args, **kwargs or {})

    def program(device):
        known, x = mask().to(device), torch.ones(2, 3, 4, device=device)
        with Seen() as seen:
            found = x[known == 1]
            places = torch.where(known == 1)
            whole = bool(known.all())
        return seen.ops, found.shape, len(places[0]), whole

    assert program(DEVICE) == program("cpu")


def test_known_value_of_ended_session_raises():
    x = mask()
    djinn.shut_down()
    with pytest.raises(djinn.errors.SessionLost):
        x[0, 0].item()


def test_known_number_is_not_constant_of_recorded_call(embedded):
    """The number is no constant even if its page is cached, so that nothing would be sent for it."""
    x = torch.arange(64.0, device=embedded)
    first = [x[place].item() for place in range(8)]
    assert first == [*range(8)]
    outputs, call = record_call(lambda t: [t * t[7].item()], [x])
    assert call is None
    assert torch.equal(outputs[0].cpu(), torch.arange(64.0) * 7)
