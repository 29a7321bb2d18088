"""Decoding with caches that grow by `cat`, on a real executor: what programs see is what local PyTorch shows, bit by bit."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from djinn.testing import executor_figures
from djinn_server.running import native_replay

REMOTE = "remote_accelerator:0"
STEPS, BEGIN, HEADS, WIDTH = 24, 300, 4, 64
DISTURBED = 12  # the step after which something is done to the cache


@pytest.fixture(scope="module", autouse=True)
def _library():
    native_replay.LIBRARY.build()


def decode(device, dim=2, disturb=None, each=None):
    """Return all results of a loop with a user's cache.

    `dim`: growing dimension. `disturb`: called once. `each`: called after each step.
    """
    torch.manual_seed(0)
    shape = [2, HEADS, BEGIN, WIDTH] if dim == 2 else [2, BEGIN, HEADS, WIDTH]
    state = SimpleNamespace(seen=[], device=device, dim=dim, copied=[])
    state.keys, state.values = (torch.randn(shape).to(device) for _ in range(2))
    shape[dim] = 1
    rows = torch.randn(STEPS, 3, *shape).to(device)
    for number in range(STEPS):
        query, key, value = rows[number]
        for _ in range(4):
            query = torch.tanh(query) * 1.5
        state.keys = torch.cat((state.keys, key), dim)
        state.values = torch.cat((state.values, value), dim)
        q, k, v = (one if dim == 2 else one.transpose(1, 2) for one in (query, state.keys, state.values))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        state.seen.append(attended.sum().item())
        if number == DISTURBED and disturb is not None:
            disturb(state)
        if each is not None:
            each(state)
    return [*state.seen, state.keys.cpu(), state.values.cpu()]


def assert_equal_results(ours, theirs):
    return all(
        torch.equal(torch.as_tensor(a).cpu(), torch.as_tensor(b).cpu()) for a, b in zip(ours, theirs, strict=True)
    )


def crop(state):
    length = state.keys.shape[state.dim] - 3
    state.keys, state.values = (one.narrow(state.dim, 0, length) for one in (state.keys, state.values))


def write_to_held_view(state):
    kept, state.keys = state.keys, torch.cat((state.keys, state.keys.narrow(state.dim, 0, 1)), state.dim)
    state.values = torch.cat((state.values, state.values.narrow(state.dim, 0, 1)), state.dim)
    kept[0].mul_(2.0)
    state.seen.append(kept.cpu())


def write_to_cache(state):
    state.keys[:, 0].zero_()


def continue_with_copy(state):
    copied = copy.deepcopy(state.keys)
    state.seen += [state.keys.cpu(), copied.cpu()]
    state.keys = copied


def reorder(state):
    order = torch.tensor([1, 0], device=state.device)
    state.keys, state.values = state.keys.index_select(0, order), state.values.index_select(0, order)


def read_layout(state):
    state.seen += [torch.tensor(state.keys.stride()), state.keys.reshape(2, -1).sum().cpu()]
    state.seen.append(state.keys.as_strided((4, 8), (8, 1)).cpu())


def hold_cache(state):
    state.seen.append(state.keys)


def fetch(state):
    state.seen.append(state.values.cpu())


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(
    "disturb",
    [crop, write_to_held_view, write_to_cache, continue_with_copy, reorder, read_layout],
    ids=lambda one: one.__name__,
)
def test_disturbed_cache_equals_local(dim, disturb):
    assert assert_equal_results(decode(REMOTE, dim, disturb), decode("cpu", dim, disturb))


@pytest.mark.parametrize("each", [hold_cache, fetch], ids=lambda one: one.__name__)
def test_caches_equal_local(each):
    assert assert_equal_results(decode(REMOTE, each=each), decode("cpu", each=each))


def test_bytes_copied_for_a_token_do_not_grow_with_the_cache():
    def count(state):
        figures = executor_figures()
        state.copied.append((figures["appended_bytes"], figures["append_copied_bytes"]))
        counted.append(state.copied[-1])

    counted = []
    assert assert_equal_results(decode(REMOTE), decode("cpu"))  # from its third run on, the program is the library's
    decode(REMOTE, each=count)
    appended, copied = (late - early for late, early in zip(counted[-1], counted[4], strict=True))
    steps, row = STEPS - 5, 2 * 2 * HEADS * WIDTH * 4
    assert steps * row <= appended <= 2 * steps * row, "a step may have run ahead in vain"
    assert copied <= BEGIN * row, "most appends copy nothing; a run ahead that nothing took costs the next one a copy"
