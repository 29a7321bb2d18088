"""Memory limit of an executor: peak memory without a limit, and time with 60 % of it.

Peaks are resident high-water marks of the executor process, minus those before the program, so workspace of ops is
included. The executor's own count of tensors is beside them. Both ways alternate in separate executors, and results
must match local PyTorch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch
from torch import nn

import djinn
from djinn.testing import executor_figures
from djinn_client.runtime import client
from evaluation.benchmarks.measuring import CannotMeasureError, Case, Effort, Outcome

REMOTE = "remote_accelerator:0"
SHARE = 0.6
Step = Callable[[], torch.Tensor]


@attrs.frozen
class Ran:
    """Figures of one executor: additional bytes, bytes of tensors, seconds per step, processor time, recomputations."""

    peak: int
    tensors: int
    seconds: float
    processor: float
    result: torch.Tensor
    figures: dict[str, int]


def executor_process() -> int:
    """Return the process of this program's executor."""
    executor = client.context.opened[0].executor
    assert executor is not None
    return executor.process_id


def memory_of(process: int, what: str) -> int:
    """Return a line of the kernel's memory status of a process, in bytes."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError as error:
        raise CannotMeasureError(f"the kernel does not tell what processes hold: {error}") from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def processor_time(process: int) -> float:
    """Return the processor seconds of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def executor(limit: int, threads: int) -> Iterator[int]:
    """Run an executor with a limit in bytes (0: none) and warmed-up ops. Yield its process."""
    djinn.shut_down()
    djinn.configure(threads=threads, memory_gib=limit / 2**30 if limit else None)
    try:
        djinn.init()
        layer = nn.Linear(8, 8).to(REMOTE)
        layer(torch.ones(2, 8).to(REMOTE)).relu().sum().backward()
        djinn.synchronize()
        yield executor_process()
    finally:
        djinn.shut_down()
        djinn.configure()


def encoder(effort: Effort) -> nn.Module:
    torch.manual_seed(0)
    width, layers = (64, 2) if effort.small else (512, 4)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def training(effort: Effort, device: str) -> Step:
    """Train an encoder with Adam."""
    model = encoder(effort).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    torch.manual_seed(1)
    data = torch.randn(4 if effort.small else 16, 128, 64 if effort.small else 512).to(device)

    def step() -> torch.Tensor:
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().cpu()

    return step


def inference(effort: Effort, device: str) -> Step:
    """Run batches through an encoder. Weights take most of the memory."""
    torch.manual_seed(0)
    width, layers = (64, 2) if effort.small else (1024, 6)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval().to(device)
    data = torch.randn(2 if effort.small else 8, 64, width)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(data.to(device))[:, 0].cpu()

    return step


def run(make: Callable[[Effort, str], Step], effort: Effort, limit: int, steps: int) -> Ran:
    """Run steps on a separate executor; the first two, which plan, are not timed."""
    with executor(limit, effort.threads) as process:
        before = memory_of(process, "VmRSS")
        Path(f"/proc/{process}/clear_refs").write_text("5")
        step = make(effort, REMOTE)
        seconds, result, used = [], torch.empty(0), 0.0
        for number in range(steps + 2):
            if number == 2:
                used = processor_time(process)
            began = time.perf_counter()
            result = step()
            seconds.append(time.perf_counter() - began)
        figures = executor_figures()
        peak = max(memory_of(process, "VmHWM") - before, figures.get("process_peak", 0))
        used = (processor_time(process) - used) / steps
        return Ran(peak, figures.get("memory_run_peak", 0), statistics.median(seconds[2:]), used, result, figures)


def compared(make: Callable[[Effort, str], Step], effort: Effort, rounds: int) -> dict[str, float]:
    """Return figures without and with a limit, alternating."""
    steps = effort.times(8)
    local = make(effort, "cpu")
    for _ in range(steps + 2):
        expected = local()
    free = run(make, effort, 0, steps)
    limit = int(SHARE * free.peak)
    frees, tight = [free], [run(make, effort, limit, steps)]
    for turn in range(rounds - 1):
        if turn % 2:
            frees.append(run(make, effort, 0, steps))
        tight.append(run(make, effort, limit, steps))
        if not turn % 2:
            frees.append(run(make, effort, 0, steps))
    for ran in (*frees, *tight):
        torch.testing.assert_close(ran.result, expected)
    last = tight[-1].figures
    return {
        "peak MB": free.peak / 1e6,
        "limit MB": limit / 1e6,
        "peak under the limit MB": max(ran.peak for ran in tight) / 1e6,
        "tensors under the limit MB": max(ran.tensors for ran in tight) / 1e6,
        "s": statistics.median(ran.seconds for ran in frees),
        "s under the limit": statistics.median(ran.seconds for ran in tight),
        "processor s": statistics.median(ran.processor for ran in frees),
        "processor s under the limit": statistics.median(ran.processor for ran in tight),
        "evictions": last["evictions"],
        "spilled MB": last["spilled_bytes"] / 1e6,
        "restored MB": last["restored_bytes"] / 1e6,
        "remade": last["remade"],
    }


def memory(effort: Effort) -> Outcome:
    """Return the time of a step with 60 % of the memory, divided by one without a limit; the worse of training and inference."""
    rounds = 1 if effort.small or effort.quick else 3
    found = {"training": compared(training, effort, rounds), "inference": compared(inference, effort, rounds)}
    slow = {name: figures["s under the limit"] / figures["s"] for name, figures in found.items()}
    within = all(figures["peak under the limit MB"] <= figures["limit MB"] for figures in found.values())
    figures = {f"{name} {key}": value for name, part in found.items() for key, value in part.items()}
    slowdown = max(slow.values())
    return Outcome(slowdown, figures | {"memory_peak_within_limit": float(within), "memory_slowdown": slowdown})


CASES = (Case("memory", 1.3, memory, keys=("memory_peak_within_limit", "memory_slowdown")),)
