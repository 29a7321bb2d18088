"""`djinn.explain_waits()` finds a needless wait that was planted in each of its programs, and what was waited for."""

from __future__ import annotations

import linecache

import pytest
import torch

import djinn

DEVICE = "remote_accelerator:0"


def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(DEVICE)


def batches(count=4):
    return [torch.full((4, 8), float(number), device=DEVICE) for number in range(count)]


def loss_each_step():
    net, total = model(), 0.0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in batches():
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.item()  # planted


def branch_on_value():
    x = torch.ones(4, device=DEVICE)
    for _ in range(3):
        x = x * 2
        if x.sum() > 100:  # planted
            x = x / 2


def copy_each_output():
    net = model()
    for x in batches():
        net(x).detach().cpu()  # planted


def printing_a_tensor():
    net = model()
    for x in batches():
        f"{net(x).detach()}"  # planted


def printing_a_number():
    net = model()
    for x in batches():
        print(float(net(x).detach().sum()))  # planted


def boolean_mask():
    x = torch.arange(16.0, device=DEVICE)
    for _ in range(3):
        x = x + 1
        chosen = x[x > 8]  # planted
        chosen.sum()


def nonzero():
    x = torch.arange(16.0, device=DEVICE)
    for _ in range(3):
        x = x + 1
        (x > 3).nonzero()  # planted


def synchronize_each_step():
    net = model()
    for x in batches():
        net(x)
        djinn.synchronize()  # planted


def numpy_for_a_metric():
    net = model()
    for x in batches():
        net(x).argmax(-1).cpu().numpy()  # planted


def tolist_of_tokens():
    net = model()
    for x in batches():
        net(x).argmax(-1).tolist()  # planted


def checked_inverse():
    x = torch.eye(4, device=DEVICE)
    for _ in range(3):
        x = torch.linalg.inv(x + torch.eye(4, device=DEVICE))  # planted


def memory_each_step():
    net = model()
    for x in batches():
        net(x)
        torch.remote_accelerator.memory_allocated()  # planted


def published_weights_each_step():
    net = model()
    for x in batches():
        net(x)
        djinn.weights.published()  # planted


def exceed_memory():
    x = torch.ones(1 << 20, device=DEVICE)
    copies = []
    for number in range(4):
        for _ in range(30):
            x = x * 1.0  # the executor is busy when the next tensor comes
        copies.append((x + number).to("cpu", non_blocking=True))
        torch.full((1 << 20,), float(number)).to(DEVICE)  # planted
    return [copy.sum() for copy in copies]


PROGRAMS = {
    loss_each_step: "a number",
    branch_on_value: "a condition",
    copy_each_output: "a copy to the CPU",
    printing_a_tensor: "printing",
    printing_a_number: "printing",
    boolean_mask: "a shape",
    nonzero: "a shape",
    synchronize_each_step: "synchronization",
    numpy_for_a_metric: "a copy to the CPU",
    tolist_of_tokens: "a copy to the CPU",
    checked_inverse: "a check of the result",
    memory_each_step: "memory figures",
    published_weights_each_step: "weights at an address",
    exceed_memory: "too many unanswered submissions",
}


@pytest.fixture(scope="module", autouse=True)
def _over_tcp(over_tcp):
    del over_tcp


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_explain_waits_finds_planted_wait(program, capsys):
    program()  # recorded once: what is foreseen from then on is what waits in a long run
    djinn.synchronize()
    before = djinn.stats()["round_trips"]
    with djinn.explain_waits() as report:
        program()
    waited = djinn.stats()["round_trips"] - before
    file, first = program.__code__.co_filename, program.__code__.co_firstlineno
    planted = next(line for line in range(first, first + 15) if "# planted" in linecache.getline(file, line))
    (found,) = [one for one in report.waits if (one.file, one.line) == (file, planted)] or [None]
    assert found is not None, str(report)
    assert found.cause == PROGRAMS[program], str(report)
    assert found.function == program.__name__
    assert "# planted" in found.text
    assert 0 < found.seconds <= report.seconds
    assert sum(one.times for one in report.waits) == waited, str(report)
    assert str(planted) in str(report)
    assert found.advice in str(report)


def test_explain_waits_reports_nothing_without_waits():
    net = model()
    with djinn.explain_waits() as report:
        net(batches(1)[0])
    assert str(report) == "the program waited for no round trip"
    with djinn.explain_waits() as after:
        pass
    assert after.waits == ()
