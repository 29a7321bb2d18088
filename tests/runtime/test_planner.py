"""Plans are found again for programs of the same structure, and only for those."""

from __future__ import annotations

import pytest
import torch

import djinn
from djinn_client.runtime.planning import planner
from djinn_client.runtime.planning.planner import TINY_INSTRUCTIONS, UNPLANNED_RUNS

pytestmark = pytest.mark.usefixtures("embedded")
DEVICE = "remote_accelerator:0"


def twice_added(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Adds to `a` twice, with a write to `b` in between: the second sum is the first one only if `b` is elsewhere."""
    doubled = (a + 1) * 2
    b.add_(5)
    return doubled + (a + 1) * 3


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """On the device, with nothing left to send."""
    remote = tensor.to(DEVICE)
    remote.cpu()
    return remote


def test_a_plan_for_separate_inputs_is_not_used_for_inputs_that_share_memory() -> None:
    apart = ready(torch.zeros(3)), ready(torch.zeros(3))
    base = ready(torch.zeros(3))
    together = base, base.view(3)
    together[1].cpu()
    assert twice_added(*apart).tolist() == [5.0] * 3
    assert twice_added(*together).tolist() == [20.0] * 3


@pytest.mark.parametrize(("first", "second"), [(2, 2.0), (0.0, -0.0), (2.0, 3.0)])
def test_a_plan_that_merged_equal_scalars_is_not_used_for_others(first: float, second: float) -> None:
    x = ready(torch.tensor([1, -1]))
    assert_same(torch.tensor([1, -1]), x, first, first)
    assert_same(torch.tensor([1, -1]), x, first, second)


def assert_same(local: torch.Tensor, remote: torch.Tensor, first: float, second: float) -> None:
    """Two products that are one only if the scalars are."""

    def products(t: torch.Tensor) -> torch.Tensor:
        left, right = t * first, t * second
        return torch.stack([left.double(), right.double()])

    got, want = products(remote).cpu(), products(local)
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())


@pytest.mark.parametrize(
    ("length", "unplanned"), [(3, UNPLANNED_RUNS), (TINY_INSTRUCTIONS + 1, 1)], ids=["tiny", "short"]
)
def test_a_short_program_is_planned_when_it_comes_again_and_then_no_more(length: int, unplanned: int) -> None:
    x = ready(torch.randn(4, 4))

    def run() -> float:
        y = x @ x
        for _ in range(length - 2):
            y = y.relu()
        return y.sum().item()

    djinn.reset_stats()
    want = [run() for _ in range(unplanned)]
    assert (djinn.stats()["programs_unplanned"], djinn.stats()["plans_made"]) == (unplanned, 0)
    assert djinn.stats()["templates_sent"] == 1
    want.append(run())
    assert len(set(want)) == 1
    assert (djinn.stats()["programs_unplanned"], djinn.stats()["plans_made"]) == (unplanned, 1)
    djinn.reset_stats()
    run()
    assert djinn.stats()["plans_made"] == 0
    assert djinn.stats()["plans_reused"] == 1
    assert djinn.stats()["templates_reused"] == 1


def test_a_short_program_under_a_limit_of_memory_is_planned_at_once() -> None:
    djinn.shut_down()
    djinn.configure(memory_limits={"": 1 << 30})
    try:
        x = ready(torch.randn(4, 4))
        djinn.reset_stats()
        x.sinh().cosh().sum().item()
        assert (djinn.stats()["programs_unplanned"], djinn.stats()["plans_made"]) == (0, 1)
    finally:
        djinn.shut_down()
        djinn.configure(memory_limits=())


def test_the_profile_of_a_program_without_a_plan_is_made_when_it_is_asked_for() -> None:
    x = ready(torch.randn(4, 4))
    djinn.reset_stats()
    x.cosh().sinh().sum().item()
    assert djinn.stats()["plans_made"] == 0
    profile = djinn.last_profile()
    assert profile is not None
    assert djinn.stats()["plans_made"] == 1
    assert djinn.last_profile() is profile


def test_programs_that_look_at_other_places_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "UNPLANNED_RUNS", 1)
    local = torch.arange(400.0)
    x = ready(local)
    djinn.reset_stats()
    for first, second in [(3, 5), (3, 5), (5, 5), (0, 399), (399, 0), (1, 1), (0, 0)]:
        doubled = (x[first] + 1) * (x[second] + 1)
        assert doubled.cpu() == (local[first] + 1) * (local[second] + 1), (first, second)
    assert djinn.stats()["programs_unplanned"] == 1  # the first
    assert djinn.stats()["plans_made"] <= 2  # one of which takes both places as one
