"""Start-up cost: importing Djinn, the first value, and a new program.

    python -m evaluation.benchmarks.bench_starting [--json] [--quick] [--case embedded]

The references are processes that only import torch, in alternation, and repeated runs of the same program.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from evaluation import served as servers
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main
from evaluation.benchmarks.serving import connected

REMOTE = "remote_accelerator:0"
TORCH = "import torch"
IMPORTED = "import torch, djinn"
FIRST = "import torch, djinn; torch.ones(3, device='remote_accelerator:0').sum().item()"
EARLY = "import djinn, torch; torch.ones(3, device='remote_accelerator:0').sum().item()"
PROCESSES = 8  # processes of each kind per round
COMPILED = (
    "PYTHONDONTWRITEBYTECODE"  # removed from the environment, so that imports are compiled once, as in an installation
)

Op = Callable[[torch.Tensor], torch.Tensor]
OPS: tuple[Op, ...] = (
    torch.sin, torch.cos, torch.relu, torch.sigmoid, torch.tanh, torch.neg, torch.abs, lambda x: x + 1, lambda x: x * 2,
    lambda x: x.t(), lambda x: x @ x.t(), lambda x: x - x.mean(), lambda x: x.softmax(-1), lambda x: x.cumsum(0),
)  # fmt: skip
LENGTH = 6  # ops of a program besides the fetched sum


def seconds_beyond_torch(effort: Effort, program: str | Path, environment: Mapping[str, str] | None = None) -> Outcome:
    """Return the median additional seconds, and processor seconds, of a process over one that only imports torch.

    `program`: source text of the process, or a script.
    """
    results: dict[str | Path, list[float]] = {TORCH: [], program: []}
    processor: dict[str | Path, list[float]] = {TORCH: [], program: []}
    variables = os.environ | {"OMP_NUM_THREADS": str(effort.threads)} | (environment or {})
    variables.pop(COMPILED, None)
    subprocess.run(_command(program), env=variables, check=True)
    for turn in range(effort.rounds * effort.times(PROCESSES) // 2):
        for text in (TORCH, program) if turn % 2 else (program, TORCH):
            start, before = time.perf_counter(), _of_children()
            subprocess.run(_command(text), env=variables, check=True)
            results[text].append(time.perf_counter() - start)
            processor[text].append(_of_children() - before)
    torch_alone, ours = statistics.median(results[TORCH]), statistics.median(results[program])
    beyond = statistics.median(processor[program]) - statistics.median(processor[TORCH])
    return Outcome(ours - torch_alone, {"torch s": torch_alone, "ours s": ours, "processor s beyond": beyond})


def _command(program: str | Path) -> list[str]:
    what = [str(program)] if isinstance(program, Path) else ["-c", program]
    return [sys.executable, "-W", "ignore", *what]


def _of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def import_(effort: Effort) -> Outcome:
    return seconds_beyond_torch(effort, IMPORTED)


def embedded(effort: Effort) -> Outcome:
    return seconds_beyond_torch(effort, FIRST)


def embedded_at_import(effort: Effort) -> Outcome:
    return seconds_beyond_torch(effort, EARLY, {"DJINN_START_AT_IMPORT": "1"})


def embedded_prepared(effort: Effort) -> Outcome:
    return seconds_beyond_torch(effort, FIRST, {"DJINN_PREPARED_SECONDS": "30"})


def embedded_again(effort: Effort) -> Outcome:
    """Return the additional seconds of later runs of a script, whose executor starts before the import of PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(EARLY)
        return seconds_beyond_torch(effort, script)


def connected_process(effort: Effort) -> Outcome:
    with servers.served(threads=effort.threads) as serving:
        environment = {"DJINN_SERVERS": serving.tcp, "DJINN_TOKEN": serving.token}
        return seconds_beyond_torch(effort, FIRST, environment)


def new_program(effort: Effort) -> Outcome:
    """Return the median time of the first run of small programs, divided by that of their fourth run."""
    generator = random.Random(0)

    def run(ops: list[Op], x: torch.Tensor) -> float:
        for op in ops:
            x = op(x)
        return x.sum().item()

    with connected(threads=effort.threads):
        x = torch.randn(8, 8).to(REMOTE)
        programs = [[generator.choice(OPS) for _ in range(LENGTH)] for _ in range(effort.times(100))]
        for op in OPS:
            run([op], x)
        turns = []
        for _ in range(4):
            seconds = []
            for program in programs:
                start = time.perf_counter()
                run(program, x)
                seconds.append(time.perf_counter() - start)
            turns.append(statistics.median(seconds) * 1e3)
        first, second, _, known = turns
        return Outcome(first / known, {"first ms": first, "second ms": second, "known ms": known})


CASES = [
    Case("import", 0.15, import_, unit="s"),
    Case("served", 0.15, connected_process, unit="s"),
    Case("embedded", 0.5, embedded, unit="s"),
    Case("embedded_at_import", 0.5, embedded_at_import, unit="s"),
    Case("embedded_again", 0.5, embedded_again, unit="s"),
    Case("embedded_prepared", 0.5, embedded_prepared, unit="s"),
    Case("new_program", None, new_program),
]

if __name__ == "__main__":
    main("starting: seconds beyond `import torch`; a new program over a known one", CASES)
