"""The short form of `hostile_ops.py`, and what once lost a session."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from long_forms import long_or

import djinn
from djinn.testing import open_session
from djinn_core.errors import RemoteError, UnsupportedOperation
from djinn_core.system.printable import printable
from djinn_core.wire import limits
from djinn_core.wire.messages import Submit, encode
from evaluation.fuzz.hostile_ops import PROGRAM_EVERY, REMOTE, run


@pytest.mark.timeout(900)  # a machine that does other things besides
def test_hostile_ops_keep_session(embedded):
    found = run(count := long_or(60, 160), seed=1, first=(PROGRAM_EVERY - count) // 2)
    assert found["raised"] > count * 0.6
    assert found["programs"] == 1


def descend(levels, work):
    return descend(levels - 1, work) if levels else work()


@pytest.mark.parametrize(
    "work",
    [
        lambda one, number: (one * number).sum().cpu(),
        lambda one, number: torch.full((3,), float(number)).to(REMOTE),
        lambda one, number: djinn.synchronize(),
    ],
    ids=["fetch", "upload", "synchronize"],
)
def test_programs_near_recursion_limit_keep_session(embedded, monkeypatch, work):
    witness = torch.arange(4.0).to(REMOTE)
    session = open_session()
    work(witness, 0.5)
    here = len(inspect.stack(0))
    before = sys.getrecursionlimit()
    raised = 0
    try:
        sys.setrecursionlimit(here + 500)
        for left in range(20, 260, 3):
            try:
                descend(500 - left, lambda number=left: work(witness, number))
            except RecursionError:
                raised += 1
    finally:
        sys.setrecursionlimit(before)
    assert 10 < raised < 80
    with djinn.deadline(60):  # a lock that stayed taken would be waited for
        assert witness.cpu().tolist() == [0, 1, 2, 3]
    assert open_session() is session


def test_unencodable_texts_are_escaped(embedded):
    assert printable("a\ud800b") == "a\\ud800b"
    assert len(encode(Submit(1, refused=printable("\udfff")))) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda one: torch.ones([1] * 129, device=REMOTE),
        lambda one: one[:1].view([1] * 129),
        lambda one: torch.empty([1] * 129).to(REMOTE),
        lambda one: one.repeat([1] * 129),
        lambda one: torch.div(one, 2, rounding_mode="x" * 100_000),
        lambda one: one.roll([1] * 100_000, [0] * 100_000),
        lambda one: one.split([0] * 10_000 + [4]),
        lambda one: torch.special.hermite_polynomial_h(one, 1 << 40),
    ],
    ids=["factory", "view", "upload", "repeat", "text", "roll", "split", "degree"],
)
def test_arguments_over_limits_raise_at_op(embedded, make):
    witness = torch.arange(4.0).to(REMOTE)
    session = open_session()
    with pytest.raises(UnsupportedOperation, match=r"\d"):
        make(witness)
    assert witness.cpu().tolist() == [0, 1, 2, 3]
    assert open_session() is session


@pytest.mark.parametrize("shape", [(0, (1 << 63) - 1), (1 << 62, 0, 3)])
def test_huge_empty_shapes_are_fetched(embedded, shape):
    one = torch.arange(4.0).to(REMOTE)
    for made in (one[:0].reshape(shape), one[:1].expand(shape), torch.zeros(shape, device=REMOTE)):
        assert made.cpu().shape == shape
    assert one.cpu().tolist() == [0, 1, 2, 3]


def test_large_program_is_sent_in_several_submissions(embedded, monkeypatch):
    monkeypatch.setattr(limits, "ARGUMENTS_SENT", 64)
    ones = [torch.ones(2, device=REMOTE) for _ in range(200)]
    djinn.reset_stats()
    lists = [torch._foreach_add(ones[:n], float(n)) for n in (10, 100, 20, 20, 20)]
    total = torch.stack([tensor for made in lists for tensor in made]).sum()
    del lists
    assert total.item() == 2 * sum(n * (1 + n) for n in (10, 100, 20, 20, 20))
    assert djinn.stats()["submissions"] > 4


def test_many_values_are_freed_in_parts(embedded, monkeypatch):
    ones = [torch.ones(2, device=REMOTE) for _ in range(300)]
    djinn.synchronize()
    before = torch.remote_accelerator.memory_allocated()
    monkeypatch.setattr(limits, "HANDLES_SENT", 64)
    del ones
    djinn.synchronize()
    assert torch.remote_accelerator.memory_allocated() <= before - 300 * 8


def test_unplannable_part_keeps_other_parts(embedded, monkeypatch):
    """Later parts of the program run, and the values that they free are freed."""
    ones = [torch.ones(1000, device=REMOTE) for _ in range(20)]
    kept = torch.ones(4, device=REMOTE)
    djinn.synchronize()
    before = torch.remote_accelerator.memory_allocated()
    planner = open_session().executors.current[0].submissions.planner
    prepare, failed = planner.prepare, []

    def fail_once(program):
        if not failed:
            failed.append(program)
            raise RuntimeError("this part has no plan")
        return prepare(program)

    monkeypatch.setattr(planner, "prepare", fail_once)
    monkeypatch.setattr(limits, "INSTRUCTIONS", 10)
    made = [one + 1 for one in ones]
    last = kept * 2
    del ones
    with pytest.raises(RuntimeError, match="this part has no plan"):
        kept.sum().item()
    assert last.tolist() == [2.0] * 4
    with pytest.raises(RemoteError, match="this part has no plan"):
        made[0].tolist()
    assert made[-1].tolist() == [2.0] * 1000
    del made
    djinn.synchronize()
    assert torch.remote_accelerator.memory_allocated() <= before - 20 * 4000 + last.nbytes


def test_unsendable_program_poisons_its_results_only(embedded, monkeypatch):
    session = open_session()
    written, kept = torch.zeros(4, device=REMOTE), torch.ones(4, device=REMOTE)
    djinn.synchronize()
    monkeypatch.setattr(limits, "HEAD_BYTES", 1500)
    made = torch.stack([kept] * 300)
    written.add_(1)
    with pytest.raises(RemoteError, match="message of a program has"):
        made.cpu()
    monkeypatch.undo()
    with pytest.raises(RemoteError, match="message of a program has"):
        written.cpu()
    assert kept.cpu().tolist() == [1.0] * 4
    assert torch.stack([kept] * 300).sum().item() == 1200
    assert open_session() is session


def test_many_tensors_are_fetched_in_parts(embedded, monkeypatch):
    monkeypatch.setattr(limits, "BUFFERS", 16)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.full((2,), float(n))) for n in range(50)).to(REMOTE)
    assert [p[0].item() for p in model.cpu()] == list(range(50))
