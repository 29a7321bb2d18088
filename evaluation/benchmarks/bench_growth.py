"""Growth of cost: processor time of client and executor at four sizes, and the exponent of each kind of work.

    python -m evaluation.benchmarks.bench_growth [--kinds NAME...] [--factor 1.0] [--repeats 3] [--more 5]

An exponent is the slope of the least squares line through the four points on logarithmic scales; 1 is linear. Rounds
alternate over all sizes, and the fastest run of each size counts, because other load only adds time. A kind above `BAR`
gets `--more` further rounds. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import djinn
from djinn_core.errors import DjinnError

REMOTE = "remote_accelerator:0"
BAR = 1.1  # maximum exponent
SIZES = (2000, 4000, 8000, 16000)
SMALL = tuple(size // 20 for size in SIZES)  # sizes for kinds that need a submission or a thread per element
Kind = Callable[[list[torch.Tensor]], None]


def executor_seconds() -> float:
    """Return the processor time of this process's children, including all threads."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                tasks = entry.parent.glob("task/*/schedstat")
                total += sum(int(task.read_text().split()[0]) for task in tasks)
        except OSError:
            continue  # it has ended
    return total / 1e9


# --- lists ---------------------------------------------------------------------------------------------------------


def made(tensors: list[torch.Tensor]) -> None:
    """Make a list of new tensors."""
    torch._foreach_add(tensors, 1.0)[-1].cpu()


def written(tensors: list[torch.Tensor]) -> None:
    """Write to a list in place."""
    torch._foreach_mul_(tensors, 1.5)
    tensors[-1].cpu()


def operands(tensors: list[torch.Tensor]) -> None:
    """Run one op with many operands."""
    torch.stack(tensors).cpu()


def results(tensors: list[torch.Tensor]) -> None:
    """Run one op with many results."""
    pieces = torch.ones(len(tensors), 4, device=REMOTE).unbind()
    pieces[-1].cpu()


def fused(tensors: list[torch.Tensor]) -> None:
    """Run a fused optimizer step."""
    step = torch.ones((), device=REMOTE)
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    lists = [[torch.zeros_like(t) for t in tensors] for _ in range(3)]
    torch._fused_adam_(tensors, *lists, [], [step.clone() for _ in tensors], **numbers, maximize=False)
    tensors[-1].cpu()


def stepped(tensors: list[torch.Tensor]) -> None:
    """Run two steps of an optimizer over many parameters."""
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=True)
    optimizer.step()
    optimizer.step()
    parameters[-1].detach().cpu()


def fetched(tensors: list[torch.Tensor]) -> None:
    """Fetch many tensors separately."""
    for tensor in tensors:
        tensor.cpu()


def uploaded(tensors: list[torch.Tensor]) -> None:
    """Upload many tensors."""
    kept = [torch.ones(4).to(REMOTE) for _ in tensors]
    kept[-1].cpu()


# --- views ---------------------------------------------------------------------------------------------------------


def viewed(tensors: list[torch.Tensor]) -> None:
    """Make a chain of views."""
    view = tensors[0]
    for _ in tensors:
        view = view.view(-1)
    view.cpu()


def reshaped(tensors: list[torch.Tensor]) -> None:
    """Make a chain of different views."""
    view = tensors[0]
    for number in range(len(tensors)):
        view = view.view(2, 2) if number % 2 else view.view(4)
    view.cpu()


def differentiated(tensors: list[torch.Tensor]) -> None:
    """Differentiate through a chain of views."""
    view = base = tensors[0].clone().requires_grad_()
    for number in range(len(tensors)):
        view = view.view(2, 2) if number % 2 else view.view(4)
    view.sum().backward()
    assert base.grad is not None
    base.grad.cpu()


def looked_at(tensors: list[torch.Tensor]) -> None:
    """Read many elements of one tensor separately, from many pages (`partial_fetch.py`)."""
    values = torch.arange(len(tensors) * 40, device=REMOTE)
    assert sum(int(value) for value in values[::40]) == 40 * len(tensors) * (len(tensors) - 1) // 2


def aliased(tensors: list[torch.Tensor]) -> None:
    """Write to many views of one storage."""
    base = torch.zeros(len(tensors), 4, device=REMOTE)
    views = [base[number] for number in range(len(tensors))]
    for view in views:
        view.add_(1)
    base.sum().cpu()


def aliased_gradients(tensors: list[torch.Tensor]) -> None:
    """Write to many views of one tensor under autograd."""
    start = torch.zeros(len(tensors), 4, device=REMOTE, requires_grad=True)
    base = start * 1
    for number in range(len(tensors)):
        base[number].mul_(2)
    base.sum().backward()
    assert start.grad is not None
    start.grad.sum().cpu()


# --- programs ------------------------------------------------------------------------------------------------------


def long(tensors: list[torch.Tensor]) -> None:
    """Run a long chain of dependent ops."""
    value = tensors[0]
    for _ in tensors:
        value = value + 1
    value.cpu()


def wide(tensors: list[torch.Tensor]) -> None:
    """Run many ops whose results all stay alive."""
    kept = [tensor + 1 for tensor in tensors]
    kept[-1].cpu()


def live(tensors: list[torch.Tensor]) -> None:
    """Submit programs while many tensors are alive: one submission per 20 tensors."""
    value = tensors[0]
    for _ in tensors[::20]:
        value = value + 1
        value.cpu()


def freed(tensors: list[torch.Tensor]) -> None:
    """Free many tensors between submissions."""
    kept = [torch.ones(4, device=REMOTE) for _ in tensors]
    while kept:
        del kept[-100:]
        tensors[0].cpu()


def planned(tensors: list[torch.Tensor]) -> None:
    """Run many different programs."""
    for number in range(len(tensors)):
        value = tensors[number]
        for bit in range(12):
            value = value * 2 if number >> bit & 1 else value + 1
        value.cpu()


def sized(tensors: list[torch.Tensor]) -> None:
    """Run one program with many sizes."""
    for number in range(len(tensors)):
        (torch.ones(number + 2, device=REMOTE) * 2 + 1).sum().cpu()


# --- hooks and threads ---------------------------------------------------------------------------------------------


def hooked(tensors: list[torch.Tensor]) -> None:
    """Use many tensors with a hook each."""
    parameters = [tensor.requires_grad_() for tensor in tensors]
    for parameter in parameters:
        parameter.register_hook(lambda gradient: gradient * 2)
    torch.stack(parameters).sum().backward()
    assert parameters[-1].grad is not None
    parameters[-1].grad.cpu()


def hooked_once(tensors: list[torch.Tensor]) -> None:
    """Use many hooks on one tensor."""
    leaf = torch.ones(4, device=REMOTE, requires_grad=True)
    for _ in tensors:
        leaf.register_hook(lambda gradient: gradient + 1)
    leaf.sum().backward()
    assert leaf.grad is not None
    leaf.grad.cpu()


def modules(tensors: list[torch.Tensor]) -> None:
    """Call many modules with a hook each."""
    model = torch.nn.Sequential(*(torch.nn.Hardtanh() for _ in tensors))
    for module in model:
        module.register_forward_hook(lambda *_: None)
    model(tensors[0]).cpu()


def threads(tensors: list[torch.Tensor]) -> None:
    """Run many threads at a time, each with its own program."""
    begun = threading.Barrier(len(tensors))

    def work(tensor: torch.Tensor) -> None:
        value = tensor + 1
        begun.wait()
        (value * 2).cpu()

    started = [threading.Thread(target=work, args=(tensor,)) for tensor in tensors]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


# --- failures ------------------------------------------------------------------------------------------------------


def failing(tensors: list[torch.Tensor]) -> None:
    """Run many failing in-place ops in one program."""
    beyond = torch.tensor([99], device=REMOTE)
    for tensor in tensors:
        tensor.index_fill_(0, beyond, 1.0)
    expect_failure()


def failing_views(tensors: list[torch.Tensor]) -> None:
    """Run many failing in-place ops on views of one storage, which is poison after the first."""
    base, beyond = torch.zeros(len(tensors), 4, device=REMOTE), torch.tensor([99], device=REMOTE)
    for number in range(len(tensors)):
        base[number].index_fill_(0, beyond, 1.0)
    expect_failure()


def failing_between(tensors: list[torch.Tensor]) -> None:
    """Run many failing ops, each between ops that resize an operand."""
    beyond = torch.tensor([99], device=REMOTE)
    for tensor in tensors:
        out = torch.empty(0, device=REMOTE)
        torch.add(tensor, 1, out=out)
        tensor.index_fill_(0, beyond, 1.0)
    expect_failure()


def failing_alone(tensors: list[torch.Tensor]) -> None:
    """Fail separate submissions while many tensors are alive: one per 20 tensors."""
    beyond = torch.tensor([99], device=REMOTE)
    for tensor in tensors[::20]:
        made = tensor.index_select(0, beyond)
        with contextlib.suppress(DjinnError, IndexError):
            made.cpu()


def refused(tensors: list[torch.Tensor]) -> None:
    """Call many ops that are rejected on the client: one per 20 tensors."""
    for tensor in tensors[::20]:
        with contextlib.suppress(RuntimeError):
            tensor + tensors[0][:3]


def resized(tensors: list[torch.Tensor]) -> None:
    """Resize many uploads in one program."""
    kept = [torch.ones(4).to(REMOTE) for _ in tensors]
    for tensor in kept:
        tensor.resize_(8)
    kept[-1].cpu()


def expect_failure() -> None:
    """Raise AssertionError if nothing has failed."""
    try:
        djinn.synchronize()
    except (DjinnError, IndexError):
        return
    raise AssertionError("nothing failed")


KINDS: dict[Kind, Sequence[int]] = {
    **dict.fromkeys((made, written, operands, results, fused, stepped, uploaded), SIZES),
    **dict.fromkeys((viewed, reshaped, differentiated, looked_at, aliased, aliased_gradients), SIZES),
    **dict.fromkeys((long, wide, live, freed, hooked, hooked_once, modules), SIZES),
    **dict.fromkeys((failing, failing_views, failing_between, failing_alone, refused, resized), SIZES),
    **dict.fromkeys((fetched, planned, sized, threads), SMALL),
}


def measured(kind: Kind, size: int) -> dict[str, float]:
    """Return the seconds of one call for a size."""
    tensors = [torch.ones(4, device=REMOTE) for _ in range(size)]
    djinn.synchronize()
    wall, client, executor = time.perf_counter(), time.process_time(), executor_seconds()
    kind(tensors)
    return {
        "wall": time.perf_counter() - wall,
        "client": time.process_time() - client,
        "executor": executor_seconds() - executor,
    }


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of the least squares line on logarithmic scales."""
    across, up = [math.log(size) for size in sizes], [math.log(one) for one in seconds]
    middle, height = sum(across) / len(across), sum(up) / len(up)
    products = sum((x - middle) * (y - height) for x, y in zip(across, up, strict=True))
    return products / sum((x - middle) ** 2 for x in across)


def exponent_of(sizes: Sequence[int], rows: Sequence[dict[str, float]]) -> float:
    """Return the exponent of processor time on both sides."""
    return slope(sizes, [row["client"] + row["executor"] for row in rows])


def quickest(kind: Kind, sizes: Sequence[int], repeats: int, more: int) -> list[dict[str, float]]:
    """Return the fastest run of each size over `repeats` rounds, plus `more` rounds if the exponent is above `BAR`."""
    rows: list[dict[str, float]] = []
    for count in range(repeats + more):
        if count >= repeats and exponent_of(sizes, rows) <= BAR:
            break
        now = [measured(kind, size) for size in sizes]
        pairs = zip(rows, now, strict=True) if rows else zip(now, now, strict=True)
        rows = [min(pair, key=lambda row: row["client"] + row["executor"]) for pair in pairs]
    return rows


def main() -> None:
    """Measure, print a table, then JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", default=[kind.__name__ for kind in KINDS])
    parser.add_argument("--factor", type=float, default=1.0, help="on all sizes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--more", type=int, default=5)
    arguments = parser.parse_args()
    djinn.configure(threads=1)
    found: dict[str, Any] = {}
    for kind, plain in KINDS.items():
        if kind.__name__ not in arguments.kinds:
            continue
        sizes = [max(8, round(size * arguments.factor)) for size in plain]
        kind([torch.ones(4, device=REMOTE) for _ in range(8)])
        rows = quickest(kind, sizes, arguments.repeats, arguments.more)
        exponent = exponent_of(sizes, rows)
        found[kind.__name__] = {"sizes": sizes, "rows": rows, "exponent": exponent}
        shown = "  ".join(f"{row['client']:.2f}+{row['executor']:.2f}" for row in rows)
        print(f"{kind.__name__:18} {shown}  exponent {exponent:.2f}", flush=True)
    print(json.dumps({"kinds": found}))


if __name__ == "__main__":
    main()
