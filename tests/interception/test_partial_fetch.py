"""Elements of a tensor that are fetched one by one come from one copy, until the tensor is written; large tensors come in several messages."""

from __future__ import annotations

import threading

import pytest
import torch

import djinn
from djinn_client.interception import sync
from djinn_client.interception.tensors import known_contents, partial_fetch

DEVICE = "remote_accelerator:0"


@pytest.fixture(autouse=True)
def session(embedded):
    torch.ones(1, device=DEVICE).cpu()


def round_trips(run):
    """Return the number of round trips that `run` waits for."""
    before = djinn.stats()["round_trips"]
    run()
    return djinn.stats()["round_trips"] - before


def test_element_reads_share_round_trips():
    x = torch.arange(1000.0)
    remote = x.to(DEVICE) * 2
    found = []
    assert round_trips(lambda: found.extend(remote[i].item() for i in range(1000))) <= 5
    assert found == (x * 2).tolist()


def test_small_tensor_elements_take_one_round_trip():
    x = torch.arange(12.0).reshape(3, 4)
    remote = x.to(DEVICE) * 2
    found = []
    assert round_trips(lambda: found.extend(float(e) for row in remote for e in row)) == 1
    assert found == (x * 2).flatten().tolist()


def test_rng_state_is_fetched_unchanged():
    state = torch.remote_accelerator.get_rng_state()
    assert state.numel() > 1000
    torch.remote_accelerator.set_rng_state(state)


def test_large_tensor_elements_are_fetched_by_page():
    x = torch.arange(50_000.0)  # four pages
    remote = x.to(DEVICE)
    found = []
    assert round_trips(lambda: found.extend(float(e) for e in remote[10_000:40_000:10])) <= 4 * 3
    assert found == x[10_000:40_000:10].tolist()
    across = [remote[begin : begin + 8].tolist() for begin in range(16_380, 16_390)]  # the pages meet at 16,384
    assert across == [x[begin : begin + 8].tolist() for begin in range(16_380, 16_390)]
    remote[16_383] = 7.0
    assert [remote[i].item() for i in range(16_380, 16_388)] == remote.cpu()[16_380:16_388].tolist()


@pytest.mark.parametrize(
    "look",
    [
        lambda t, i: t[i, i],
        lambda t, i: t.T[i],
        lambda t, i: t[i : i + 2, ::3],
        lambda t, i: t.flip(0)[i, 0] if i % 2 else t[i].unsqueeze(0).expand(2, -1)[:, i],
        lambda t, i: t.view(torch.int16)[i, i],
        lambda t, i: torch.view_as_complex(t.view(-1, 2)).conj()[i],
        lambda t, i: torch.view_as_complex(t.view(-1, 2)).conj().imag[i : i + 2],
    ],
)
def test_slices_equal_cpu(look):
    x = torch.randn(12, 12)
    remote = x.to(DEVICE)
    for i in range(8):
        assert torch.equal(look(remote, i).cpu(), look(x, i)), i


WRITES = {
    "in place": lambda t: t.add_(1),
    "through a view": lambda t: t.view(-1)[3:].add_(2),
    "an element": lambda t: t.__setitem__((0, 0), 7.0),
    "from the CPU": lambda t: t.copy_(torch.full((4, 8), 5.0)),
    "out": lambda t: torch.add(t, 1, out=t),
    "of its data": lambda t: t.data.add_(1),
    "random": lambda t: t.uniform_(),
    "of a list": lambda t: torch._foreach_add_([t], 1.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_write_invalidates_pages(write):
    remote = torch.zeros(4, 8, device=DEVICE)
    for _ in range(3):
        assert [remote[0, i].item() for i in range(5)] == remote[0, :5].tolist()
        write(remote)
        assert [remote[0, i].item() for i in range(5)] == remote.cpu()[0, :5].tolist()


def test_scheduled_write_invalidates_pages():
    remote = torch.zeros(8, device=DEVICE)
    remote.cpu()
    with djinn.capture() as captured:
        remote.add_(1)
    schedule = djinn.plan(captured).schedule
    assert [remote[i].item() for i in range(4)] == [1.0] * 4
    djinn.planning.execute(schedule)
    assert [remote[i].item() for i in range(4)] == [2.0] * 4


def test_fetched_slice_is_a_copy():
    remote = torch.zeros(64, device=DEVICE)
    for i in range(6):
        remote[i : i + 2].cpu().add_(1)
    assert remote[5:7].tolist() == [0.0, 0.0]


def test_failed_tensor_raises_for_every_element():
    table = torch.zeros(4, 8, device=DEVICE)
    remote = torch.nn.functional.embedding(torch.tensor([9], device=DEVICE), table)[0]
    for i in range(5):
        with pytest.raises(IndexError):
            remote[i].item()
    assert [table[0, i].item() for i in range(5)] == [0.0] * 5


def test_concurrent_writes_and_reads():
    remote, seen, ready = torch.zeros(256, device=DEVICE), [], threading.Barrier(2)

    def read_elements():
        for turn in range(20):
            ready.wait()
            ready.wait()
            seen.append({remote[i].item() for i in range(5)} == {turn + 1.0})

    reader = threading.Thread(target=read_elements)
    reader.start()
    for _ in range(20):
        ready.wait()
        remote.add_(1)
        ready.wait()
    reader.join()
    assert seen == [True] * 20


def test_cached_pages_over_budget_are_evicted(monkeypatch):
    table = known_contents.known_contents
    monkeypatch.setattr(known_contents, "BUDGET", 3 * partial_fetch.PAGE)
    x = torch.arange(100_000.0)  # seven pages
    remote = x.to(DEVICE)
    found = [remote[i].item() for i in range(0, 100_000, 1000)]
    assert found == x[::1000].tolist()
    assert table.nbytes <= known_contents.BUDGET
    kept = table.get(remote.remote.storage.id)
    assert 1 <= sum(isinstance(key, known_contents.Page) for key in kept.copies) <= 2
    assert remote[99_000].item() == 99_000


def test_freed_storage_has_no_known_contents():
    value = (torch.ones(4, device=DEVICE) * 2).remote
    table, number = known_contents.known_contents, value.storage.id
    value.storage.contents.keep(value.handle, torch.ones(4))
    assert table.get(number) is not None
    version = value.storage.version
    del value
    assert table.get(number) is None
    table.at(number, -1).keep(0, torch.ones(4))
    assert table.get(number) is None
    assert version == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.permute(2, 0, 1),
        lambda t: t[:, ::2],
        lambda t: t[3:],
        lambda t: t[0].expand(4, 50, 60),
    ],
    ids=["contiguous", "permuted", "with gaps", "with an offset", "expanded"],
)
def test_large_fetch_in_parts_equals_tensor(monkeypatch, view):
    for module in (partial_fetch, sync):
        monkeypatch.setattr(module, "PART_BYTES", 10_000)
    local = torch.randn(20, 50, 60)
    remote = view(local.to(DEVICE))
    before = djinn.stats()["round_trips"]
    fetched = remote.cpu()
    assert torch.equal(fetched, view(local))
    assert fetched.stride() == view(local).clone().stride()
    assert djinn.stats()["round_trips"] > before + 3
