"""Thirty programs on a pool of two executors with default settings, divided by the same on one executor.

    python -m evaluation.benchmarks.bench_pool_defaults [--json] [--quick] [--case calibrated,uncalibrated_gpt2]

Three clients are separate processes with one thread each: two with one executor, one with two. Every program runs five
times on all of them. Then they alternate, with the order reversed in every second round. The value is the median ratio
of wall times within a round. `one over one` is the ratio of the two single-executor clients: its distance from 1 is the
noise. The figures also have the processor time of the busiest executor and of the client, as ratios, which other load
disturbs less. `uncalibrated`: the devices were never measured. `calibrated`: after the background calibration at the
pool's first use.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import attrs
import torch

import djinn
from djinn_client.runtime import client as djinn_client
from djinn_costs.roofline.calibration.workloads import Workload, workloads
from evaluation.benchmarks.measuring import CannotMeasureError, Case, Effort, Outcome, main, median_of

WARM = 5  # warm-up runs, after which the pool should have decided
CALLS = 10  # calls per round
WAIT_SECONDS = 1200.0
LONGEST = 25  # number of the fastest programs of `djinn validate`
REMOTE = torch.device("remote_accelerator:0")
Step = Callable[[], object]


class Branches(torch.nn.Module):
    """An encoder for each of two modalities, and a head that combines them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.seeing, self.reading = (
            torch.nn.TransformerEncoder(
                torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True), layers
            )
            for _ in range(2)
        )
        self.patches = torch.nn.Conv2d(3, width, 16, 16)
        self.words = torch.nn.Embedding(1000, width)
        self.together = torch.nn.Linear(2 * width, 16)

    def forward(self, pictures: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        features = self.seeing(self.patches(pictures).flatten(2).transpose(1, 2)).mean(1)
        read = self.reading(self.words(tokens)).mean(1)
        return self.together(torch.cat([features, read], -1))


class Towers(torch.nn.Module):
    """A recommender: user and item embeddings, a tower of layers for each, and their product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.users, self.items = (torch.nn.EmbeddingBag(2000, width, mode="sum") for _ in range(2))
        self.user, self.item = (
            torch.nn.Sequential(*[m for _ in range(3) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())])
            for _ in range(2)
        )

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.user(self.users(users)) * self.item(self.items(items))).sum(-1)


def _inferring(make: Callable[[], torch.nn.Module], given: Callable[[], Sequence[torch.Tensor]]) -> Callable[..., Step]:
    def build(device: torch.device) -> Step:
        model, inputs = make().eval().to(device), [item.to(device) for item in given()]

        def step() -> object:
            with torch.no_grad():
                return model(*inputs)

        return step

    return build


def _elementwise(size: int) -> Callable[..., Step]:
    def build(device: torch.device) -> Step:
        x, y = torch.rand(size).to(device), torch.rand(size).to(device)
        return lambda: (x * y + x).tanh().exp() - (y.sigmoid() / (x + 1))

    return build


def _pictures_and_words(batch: int) -> list[torch.Tensor]:
    return [torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch, 196))]


def _bags(batch: int) -> list[torch.Tensor]:
    return [torch.randint(0, 2000, (batch, 20)) for _ in range(2)]


def programs() -> list[Workload]:
    """Return thirty programs: decoding, prefill, training, convolutions, state-space and recurrent layers, two modalities, recommenders, small ops."""
    zoo_workloads = [w for w in workloads() if "768" not in w.name and "512 wide, 4x128" not in w.name]
    return [
        *zoo_workloads[:LONGEST],
        Workload("multimodal, 64 wide", _inferring(partial(Branches, 64, 2), partial(_pictures_and_words, 1))),
        Workload("multimodal, 256 wide", _inferring(partial(Branches, 256, 4), partial(_pictures_and_words, 2))),
        Workload("towers, 512 wide", _inferring(partial(Towers, 512), partial(_bags, 256))),
        Workload("elementwise, tiny", _elementwise(64)),
        Workload("elementwise, large", _elementwise(1 << 21)),
    ]


# --- clients --------------------------------------------------------------------------------------------------


def processor_seconds(process: int) -> float:
    """Return the processor time of the threads of a process with nanosecond resolution."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@attrs.frozen
class CallFigures:
    """Figures of consecutive calls: median seconds per call, and processor seconds of the client and of each executor."""

    wall: float
    client: float
    executors: tuple[float, ...]

    @property
    def busiest(self) -> float:
        """Return the processor time of the busiest executor."""
        return max(self.executors)


def serve_client(pipe: Any, executors: int, cache: str, calibrate: bool) -> None:
    """Run a client process, which builds and runs the programs that `pipe` orders, and sends their figures."""
    os.environ |= {"XDG_CACHE_HOME": cache, "DJINN_CALIBRATE": str(int(calibrate))}
    torch.set_num_threads(1)
    djinn.shut_down()
    djinn.configure(executors=executors, threads=1)
    djinn.init()
    for thread in threading.enumerate():
        if thread.name == "djinn-calibration":
            thread.join()
    session = djinn_client.context.session
    assert session is not None
    processes = [item.process for item in djinn_client.context.opened]
    workloads_by_name, step = {w.name: w for w in programs()}, None
    for order, inputs in iter(pipe.recv, None):
        if order == "build":
            torch.manual_seed(0)
            djinn.reset_stats()
            step = workloads_by_name[inputs].build(REMOTE)
            djinn.synchronize()
            pipe.send(True)
        elif order == "run":
            assert step is not None
            pipe.send(_timed(step, inputs, processes))
        else:
            step = None
            pipe.send(dict(djinn.stats()))
    djinn.shut_down()


def _timed(step: Step, calls: int, processes: Sequence[int]) -> CallFigures:
    before, own = [processor_seconds(process) for process in processes], time.process_time()
    wall = median_of(partial(_finish, step), calls)
    client = time.process_time() - own
    seconds_spent = [processor_seconds(process) - then for process, then in zip(processes, before, strict=True)]
    return CallFigures(wall, client / calls, tuple([seconds / calls for seconds in seconds_spent]))


def _finish(step: Step) -> None:
    output = step()
    output = (
        next(iter(output.values())) if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    )
    if isinstance(output, torch.Tensor):
        output.cpu()
    else:
        djinn.synchronize()


EXECUTORS = {"one": 1, "two": 2, "one again": 1}  # executors of each client


class Clients:
    """Two clients with one executor each, and a client with two executors. One client works at a time."""

    def __init__(self, calibrated: bool) -> None:
        spawning = multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp(prefix="djinn-bench-")
        self._pipes, self._processes = {}, []
        for name, executors in EXECUTORS.items():
            pipe, theirs = spawning.Pipe()
            arguments = (theirs, executors, folder, calibrated)
            process = spawning.Process(target=serve_client, args=arguments, daemon=True)
            process.start()
            self._pipes[name] = pipe
            self._processes.append(process)
        atexit.register(self.close)

    def send_order(self, client: str, order: str, given: object = None) -> Any:
        """Send an order to a client and return its reply."""
        pipe = self._pipes[client]
        pipe.send((order, given))
        if not pipe.poll(WAIT_SECONDS):
            raise CannotMeasureError(f"a client did not answer {order} within {WAIT_SECONDS:.0f} s")
        return pipe.recv()

    def close(self) -> None:
        """End all clients."""
        for pipe, process in zip(self._pipes.values(), self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
                process.join(60)


@cache
def clients(calibrated: bool) -> Clients:
    """Return the clients. The first call starts them."""
    return Clients(calibrated)


def compared(name: str, calibrated: bool, effort: Effort) -> Outcome:
    """Return the time of a program on two executors, divided by its time on one executor."""
    all_of_them, calls = clients(calibrated), effort.times(CALLS)
    for item in EXECUTORS:
        all_of_them.send_order(item, "build", name)
        all_of_them.send_order(item, "run", WARM)
    rounds: list[dict[str, CallFigures]] = []
    for turn in range(effort.rounds):
        order = [*EXECUTORS] if turn % 2 else [*reversed(EXECUTORS)]
        rounds.append({item: all_of_them.send_order(item, "run", calls) for item in order})
    wall = statistics.median(result["two"].wall / result["one"].wall for result in rounds)
    same = statistics.median(result["one again"].wall / result["one"].wall for result in rounds)
    busiest = statistics.median(result["two"].busiest / max(result["one"].busiest, 1e-9) for result in rounds)
    client = statistics.median(result["two"].client / result["one"].client for result in rounds)
    stats = {item: all_of_them.send_order(item, "end") for item in EXECUTORS}["two"]
    figures = {
        "one ms": statistics.median(result["one"].wall for result in rounds) * 1e3,
        "two ms": statistics.median(result["two"].wall for result in rounds) * 1e3,
        "one over one": same,
        "busiest executor": busiest,
        "client": client,
        "tried": stats["placements_tried"],
        "switched off": stats["placements_switched_off"],
    }
    return Outcome(wall, figures)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


CASES = tuple(
    Case(f"{way}_{_slug(program.name)}", 1.03, partial(compared, program.name, way == "calibrated"))
    for way in ("calibrated", "uncalibrated")
    for program in programs()
)

if __name__ == "__main__":
    main("A pool of two executors with default settings, over one executor", CASES)
