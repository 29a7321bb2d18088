"""Real executors that compute again what they would have been sent: results to the bit, less on the way, copies of weights end."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch
from figures import figures

import djinn
from djinn.hooks import hookimpl
from djinn_optimizations.recomputation import Recomputation
from djinn_pool.topology import ObservedLink

REMOTE = "remote_accelerator:0"


class AlwaysReplicate:
    """An optimization that replicates each value that can be computed again."""

    djinn_api_version = "2.0"

    @hookimpl
    def djinn_register_optimizations(self):
        return [Recomputation(lambda found, _: found[-1])]


class Heads(torch.nn.Module):
    """Two readers, on two executors, of a value that one executor computes."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 64)
        self.wide = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU())
        self.left, self.right = torch.nn.Linear(512, 3), torch.nn.Linear(512, 3)

    def forward(self, tokens):
        wide = self.wide(self.table(tokens))
        return self.left(wide), self.right(wide.flip(0))


@pytest.fixture(scope="module")
def heads(make_pool):
    """Yield a pool with fixed link times. On a busy machine, measured links look slow and change the placement."""
    pins = {"table*": "0", "wide*": "0", "left*": "0", "right*": "1"}
    with (
        make_pool("pinned", pins=pins, plugins=["pool", "pinned", "cleanup", AlwaysReplicate()]) as router,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(ObservedLink, "update_speed", lambda *_: False)
        for seen in router._links._links.values():
            seen.link = attrs.evolve(seen.link, bandwidth=1e9, latency=1e-5)
        router._links._update_topology()
        yield router


def between(router):
    return figures(router)["peer_bytes"]


@torch.no_grad()
def test_replicated_node_sends_weights_once(heads):
    torch.manual_seed(0)
    theirs = Heads().eval()
    ours, tokens = copy.deepcopy(theirs).to(REMOTE), torch.randint(0, 50, (200,))
    for turn in range(3):
        before = between(heads)
        made = [t.cpu() for t in ours(tokens.to(REMOTE))]
        assert all(torch.equal(mine, other) for mine, other in zip(made, theirs(tokens), strict=True))
        sent = between(heads) - before
        if turn:
            assert sent < 100_000  # the tokens, and not 200 times 512 numbers
    weight = ours.wide[0].weight
    assert heads._locations.copies(weight.remote.handle) == {1}
    weight.mul_(2)  # ends the copy
    theirs.wide[0].weight.mul_(2)
    for mine, other in zip(ours(tokens.to(REMOTE)), theirs(tokens), strict=True):
        assert torch.equal(mine.cpu(), other)


def test_replicated_training_equals_one_executor(heads):
    torch.manual_seed(0)
    theirs = Heads()
    ours = copy.deepcopy(theirs).to(REMOTE)
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            tokens = torch.arange(step, step + 8, device=model.table.weight.device)
            left, right = model(tokens)
            optimizer.zero_grad()
            (left * right).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model.last = torch.stack(model(tokens)).cpu()
    assert torch.equal(ours.last, theirs.last)
    for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(mine.cpu(), other)


def test_replicated_failure_is_raised_once(heads):
    model = Heads().to(REMOTE)
    with torch.no_grad():
        _left, right = model(torch.full((200,), 99).to(REMOTE))
    with pytest.raises(IndexError, match="out of range") as caught:
        right.sum().item()
    assert "also:" not in "".join(getattr(caught.value, "__notes__", []))
    djinn.synchronize()
