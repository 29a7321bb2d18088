"""Programs that are known are sent in pieces while they are recorded; nothing else about them changes."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch
from long_forms import long_or

import djinn
from djinn_client.interception.recording import program_prediction
from djinn_client.interception.recording.program_prediction import (
    LONGEST,
    OPENING,
    PIECES,
    SHORTEST,
    first_piece,
    pieces_of,
)
from djinn_client.interception.recording.recorded_call import record_call
from djinn_client.interception.recording.recorder import recorders
from djinn_core.ir.form import Form
from djinn_core.ir.program import Signature

DEVICE = "remote_accelerator:0"


@pytest.fixture(autouse=True)
def session(embedded, monkeypatch):
    monkeypatch.setattr(program_prediction, "MIN_REPEATS", 2)  # most of what is tested takes less long with it
    recorders.predictable_programs.forget()
    torch.ones(1, device=DEVICE).cpu()
    djinn.reset_stats()


def chain(x, length=200, turn=-1):
    """`length` ops one after the other; another one at `turn`."""
    for i in range(length):
        x = x.mul(1.01) if i == turn else x.add(0.5)
    return x


def submissions(run):
    """Number of submissions that `run` takes."""
    before = djinn.stats()["submissions"]
    run()
    return djinn.stats()["submissions"] - before


def test_pieces_grow_and_the_last_is_not_small():
    for length in range(1500):
        ends = [0, *pieces_of(same(length)), length]
        sizes = [b - a for a, b in itertools.pairwise(ends)]
        assert sum(sizes) == length
        assert all(a == b for a, b in zip(sizes[:-1], PIECES, strict=False))
        assert all(SHORTEST <= size <= LONGEST for size in sizes[len(PIECES) : -1])
        assert len(sizes) == 1 or PIECES[0] <= sizes[-1] <= SHORTEST + LONGEST


def test_equal_steps_in_one_program_have_the_same_pieces():
    step = tuple(range(385))
    ids, kinds = step * 10, set()
    for first, end in itertools.pairwise([*pieces_of(ids), len(ids)]):
        kinds.add(ids[first:end])
    assert len(pieces_of(ids)) > 20
    assert len(kinds) < 10


def test_pieces_depend_on_the_program_and_not_on_what_was_recorded_before():
    def program():
        return tuple([Signature(Form(f"aten::op{i}", (), (), (), False), ()).id for i in range(90)]) * 9

    first, second = program(), program()
    assert not set(first) & set(second), "ids are unique"
    assert pieces_of(first) == pieces_of(second)


def same(length):
    """Signatures of a program of equal ops."""
    return (1,) * length


def test_the_first_piece_keeps_the_executor_busy_if_that_comes_soon():
    small, product = ["aten::view"], ["aten::addmm.out"]
    assert first_piece(small * 9 + product + small * 90) == 10
    assert first_piece(small * 2 + product + small * 90) == PIECES[0]
    assert first_piece(small * 90 + product) == PIECES[0]
    x = torch.ones(4, 4)
    remote = x.to(DEVICE)
    took = [submissions(lambda: chain(chain(remote, 12) @ remote, 100).cpu()) for _ in range(6)]
    assert took[3:] == [len(pieces_of(same(113), 13)) + 1] * 3


def test_a_program_that_comes_again_is_sent_in_pieces_from_the_third_time_on():
    x = torch.arange(4.0)
    remote = x.to(DEVICE)
    took = [submissions(lambda: chain(remote).cpu()) for _ in range(6)]
    assert took[:2] == [1, 1]
    assert took[2] == sum(cut >= OPENING for cut in pieces_of(same(200))) + 1, "it was recognised by its opening"
    assert took[3:] == [len(pieces_of(same(200))) + 1] * 3, "it comes after itself"


def test_a_few_steps_send_no_template_but_that_of_the_first(monkeypatch):
    monkeypatch.undo()
    remote = torch.arange(4.0).to(DEVICE)
    chain(remote).cpu()
    djinn.reset_stats()
    for _ in range(program_prediction.MIN_REPEATS - 1):
        chain(remote).cpu()
    stats = djinn.stats()
    assert (stats["templates_sent"], stats["templates_reused"]) == (0, program_prediction.MIN_REPEATS - 1)


def test_programs_that_take_turns_are_sent_from_their_first_instructions_on():
    remote = torch.arange(4.0).to(DEVICE)

    def turn():
        first = submissions(lambda: chain(remote).cpu())
        between = submissions(lambda: remote.add(1).cpu())
        return [first, between, submissions(lambda: chain(remote, 120, turn=3).cpu())]

    for _ in range(4):
        turn()
    expected = [len(pieces_of(same(200))) + 1, 1, len(pieces_of(same(120))) + 1]
    assert turn() == expected
    assert submissions(lambda: chain(remote, 120, turn=3).cpu()) < expected[2], "another one came"
    for _ in range(4):
        turn()
    assert turn() == expected


@pytest.mark.parametrize(("tail", "takes"), [(2, 1), (80, 2)])
def test_what_is_recorded_at_a_stroke_goes_at_once_unless_hardly_anything_follows(tail, takes):
    x = torch.arange(4.0)
    remote = x.to(DEVICE)
    _, call = record_call(lambda t: [chain(t, 150)], [remote])
    remote.cpu()
    for _ in range(4):
        assert torch.equal(chain(call.record([remote])[0], tail).cpu(), chain(chain(x, 150), tail))
    assert submissions(lambda: chain(call.record([remote])[0], tail).cpu()) == takes


def test_results_are_the_same_whatever_follows_the_opening():
    x = torch.arange(4.0)
    remote = x.to(DEVICE)
    for turn in [-1, -1, -1, 30, 40, 100, 150, 199, -1, -1, 33, -1, -1, -1]:
        assert torch.equal(chain(remote, turn=turn).cpu(), chain(x, turn=turn)), turn
    for length in [200, 200, 200, 24, 25, 32, 33, 96, 97, 190, 230, 1000]:
        assert torch.equal(chain(remote, length).cpu(), chain(x, length)), length


@pytest.mark.usefixtures("plan_first_runs")
def test_what_follows_a_wrong_prediction_goes_in_pieces_that_are_known():
    remote = torch.ones(4, device=DEVICE)

    def steps(others=()):
        x = remote
        for number in range(10):
            x = x.sub(1.5) if number in others else x
            for _ in range(8):
                x = chain(x * 1.01 - 0.25, 8).relu().neg()
        return x.cpu()

    for _ in range(5):
        expected = steps()
    made = []
    for other in (1, 2, 3, 4, 5, 6, 7, 8):
        before = djinn.stats()
        steps({other})
        assert djinn.stats()["submissions"] - before["submissions"] > 2
        made.append(djinn.stats()["plans_made"] - before["plans_made"])
        assert torch.equal(steps(), expected)
    assert sum(made[3:]) <= 2, made


@pytest.mark.usefixtures("plan_first_runs")
def test_programs_that_vary_in_each_step_share_the_plans_of_their_pieces():
    generator = random.Random(0)

    def steps():
        total, expected = torch.zeros((), device=DEVICE), 0.0
        for _ in range(12):
            rows = generator.choice((1, 2, 3, 5, 6, 7))
            for _ in range(4):
                total = total + (chain(torch.ones(rows, 4).to(DEVICE) * rows, 40) / rows).mean()
                expected += 1 + 20 / rows
        assert total.item() == pytest.approx(expected)

    made = []
    for _ in range(long_or(28, 40)):
        before = djinn.stats()["plans_made"]
        steps()
        made.append(djinn.stats()["plans_made"] - before)
    assert sum(made[:4]) == 4, "whole programs"
    assert sum(made[-12:]) < 6, made


def test_what_proves_wrong_is_not_foreseen_for_ever():
    remote = torch.arange(4.0).to(DEVICE)
    for _ in range(3):
        chain(remote).cpu()
    for _ in range(10):
        last = submissions(lambda: chain(remote, turn=60).cpu())
    assert last == len(pieces_of(same(200))) + 1, "the new course is foreseen now"


def test_steady_state_plans_nothing():
    remote = torch.arange(4.0).to(DEVICE)
    for _ in range(4):
        chain(remote).cpu()
    before = djinn.stats()
    for _ in range(5):
        chain(remote).cpu()
    after = djinn.stats()
    assert after["plans_made"] == before["plans_made"]
    assert after["templates_sent"] == before["templates_sent"]
    assert after["round_trips"] == before["round_trips"] + 5


def test_writes_and_views_across_pieces():
    def work(x):
        row = x[1]
        for i in range(100):
            row.add_(1.0)
            x.mul_(1.5 if i % 7 else 0.1)
            x[2:].copy_(x[:1])
        return x

    for _ in range(5):
        assert torch.equal(work(torch.ones(4, 3, device=DEVICE)).cpu(), work(torch.ones(4, 3)))


def test_random_ops_across_pieces():
    def draw(device):
        torch.manual_seed(3)
        x = torch.zeros(8, device=device)
        for _ in range(100):
            x = torch.nn.functional.dropout(x + torch.rand(8, device=device), 0.3)
        return x.cpu()

    for _ in range(4):
        assert torch.equal(draw(DEVICE), draw("cpu"))


def test_a_failure_in_a_piece_names_its_op_and_loses_nothing_else():
    table, good = torch.arange(4.0).to(DEVICE), torch.tensor([1, 2]).to(DEVICE)
    bad = torch.tensor([1, 9]).to(DEVICE)

    def work(index):
        x = chain(table, 60)
        return chain(x[index], 120), chain(x, 10)

    for _ in range(4):
        work(good)[0].cpu()
    picked, other = work(bad)
    assert torch.equal(other.cpu(), chain(chain(torch.arange(4.0), 60), 10))
    with pytest.raises(IndexError, match="index"):
        picked.cpu()
    assert torch.equal(work(good)[0].cpu(), chain(chain(torch.arange(4.0), 60)[[1, 2]], 120))


def test_each_thread_is_on_a_course_of_its_own():
    x = torch.arange(4.0)
    wrong = []

    def work(seed):
        remote = x.to(DEVICE)
        for i in range(6):
            turn = (seed * 17 + i) % 40
            if not torch.equal(chain(remote, turn=turn).cpu(), chain(x, turn=turn)):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_capture_is_not_cut():
    remote = torch.arange(4.0).to(DEVICE)
    for _ in range(4):
        chain(remote).cpu()
    before = djinn.stats()["submissions"]
    with djinn.capture() as captured:
        kept = chain(remote)
        assert djinn.stats()["submissions"] == before
    assert len(captured.graph.nodes) == 200
    assert torch.equal(kept.cpu(), chain(torch.arange(4.0)))
