"""Compare the processor time of two checkouts: is AFTER at most 2 % slower than BEFORE?

    python -m evaluation paired BEFORE AFTER [--case record,decode] [--pairs 20] [--instructions]

Background load changes by more than one percent from second to second. Runs are thus short, and every other pair is
reversed. A pair is two fresh processes, one per checkout. They run each program of `paired_programs.py` several times in the order
before, after, after, before. A checkout runs in its own `.venv` if it has one, otherwise in this process's environment with its
folders on PYTHONPATH.

Times are user + system time of the client's process and of its child, the executor. The ratio is the median over pairs. The verdict
depends on the 95 % interval of the ratio. `yes`: the interval reaches down to 1.02. `no`: the interval is above 1.02. `noise too
large`: the interval is wider than 0.03 and could hide a slowdown of 5 %. `--instructions` counts instructions of the client's process
with callgrind, which needs valgrind.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import attrs
import numpy as np
import psutil

RESAMPLES = 2000
ALLOWED_RATIO = 1.02
WIDEST_INTERVAL = 0.03  # a wider interval could hide a slowdown of 5 %
PROGRAMS = Path(__file__).with_name("paired_programs.py")
CASES = ("first_use", "record", "decode", "wait", "train")
QUADRUPLES = 4  # turns (before, after, after, before) of a program per pair of processes


@attrs.frozen
class Ratio:
    """Median of the ratios of pairs, with the bounds of its 95% interval by bootstrap over pairs."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"

    @property
    def verdict(self) -> str:
        """Return `yes` (at most 2 % slower), `no` or `noise too large`."""
        if self.low > ALLOWED_RATIO:
            return "no"
        return "noise too large" if self.high - self.low > WIDEST_INTERVAL else "yes"


@attrs.frozen
class Pairs:
    """Pairs of times of neighbouring blocks without and with a change: wall seconds, and processor seconds."""

    wall: list[tuple[float, float]] = attrs.field(factory=list)
    processors: list[tuple[float, float]] = attrs.field(factory=list)

    def milliseconds(self, steps: int) -> float:
        """Return the median wall time of a step without the change, in milliseconds. `steps`: steps per block."""
        return 1e3 * statistics.median(without for without, _ in self.wall) / steps


def processor_seconds(processes: Sequence[int]) -> float:
    """Return user + system time of other processes so far, including ended threads. Linux only."""
    return sum(time.clock_gettime((~process << 3) | 2) for process in processes)  # clock_getcpuclockid(3)


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Return the ratio of times with the change to times without it."""
    result = np.array([with_it / without for without, with_it in pairs])
    picked = np.random.default_rng(0).integers(0, len(result), (RESAMPLES, len(result)))
    low, high = np.quantile(np.median(result[picked], axis=1), (0.025, 0.975))
    return Ratio(float(np.median(result)), float(low), float(high))


def take_turns(
    run: Callable[[], object],
    without: Callable[[], AbstractContextManager[object]],
    with_it: Callable[[], AbstractContextManager[object]],
    processes: Sequence[int],
    seconds: float,
) -> Pairs:
    """Alternate blocks of `run` in the contexts `without` and `with_it` for about `seconds`, and return their times.

    Each block begins with a run that is not timed. `processes`: processes whose processor time counts.
    """
    results, end = Pairs(), time.perf_counter() + seconds
    while time.perf_counter() < end or len(results.wall) < 2:
        pair: dict[int, tuple[float, float]] = {}
        order = ((0, without), (1, with_it))
        for place, block in order if len(results.wall) % 2 else reversed(order):
            with block():
                run()
                processor, begun = processor_seconds(processes), time.perf_counter()
                run()
                pair[place] = time.perf_counter() - begun, processor_seconds(processes) - processor
        results.wall.append((pair[0][0], pair[1][0]))
        results.processors.append((pair[0][1], pair[1][1]))
    return results


# --- two checkouts ----------------------------------------------------------------------------------------------


def command_of(checkout: Path) -> tuple[str, dict[str, str]]:
    """Return the interpreter and environment variables that run a checkout's own code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DJINN_THREADS": "1", "DJINN_CALIBRATE": "0"}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    own = checkout / ".venv" / "bin" / "python"
    if own.exists():
        environment.pop("PYTHONPATH", None)
        return str(own), environment
    folders = [checkout, *sorted(checkout.glob("plugins/*"))]
    return sys.executable, environment | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


class Worker:
    """Process of one checkout that runs programs by name."""

    def __init__(self, checkout: Path, programs: Path, under: Sequence[str] = ()) -> None:
        """`under`: command prefix, such as valgrind with its options."""
        python, environment = command_of(checkout)
        command = [*under, python, "-W", "ignore", str(programs)]
        self._process = subprocess.Popen(
            command, env=environment, cwd=checkout, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.process = self._process.pid
        self._await()
        self.children = [child.pid for child in psutil.Process(self.process).children(recursive=True)]
        self.first_use = self.seconds()

    def run(self, program: str) -> None:
        """Run a program once, to its end."""
        assert self._process.stdin is not None
        print(program, file=self._process.stdin, flush=True)
        self._await()

    def seconds(self) -> tuple[float, float]:
        """Return processor time so far: of the process, and of its children."""
        return processor_seconds([self.process]), processor_seconds(self.children)

    def _await(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "done":
            raise RuntimeError(f"the program of {self._process.args!r} ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def measure_run(worker: Worker, program: str) -> tuple[float, float]:
    """Return processor time of a run: of the process, and of its children."""
    before = worker.seconds()
    worker.run(program)
    own, children = worker.seconds()
    return own - before[0], children - before[1]


@attrs.frozen
class ProgramTimes:
    """Pairs (before, after) of processor times of a program: of the client's process, and of the executor."""

    process: list[tuple[float, float]] = attrs.field(factory=list)
    children: list[tuple[float, float]] = attrs.field(factory=list)


def compare(
    before: Path, after: Path, cases: Sequence[str], pairs: int, programs: Path = PROGRAMS
) -> dict[str, ProgramTimes]:
    """Return the processor times of both checkouts, by case, over `pairs` pairs. One more pair first is a warm-up."""
    results = {case: ProgramTimes() for case in cases}
    for number in range(pairs + 1):
        order = (0, 1) if number % 2 else (1, 0)
        with ExitStack() as stack:
            workers = {at: stack.enter_context(closing(Worker((before, after)[at], programs))) for at in order}
            times = {"first_use": [[workers[at].first_use] for at in (0, 1)]}
            for case in cases:
                if case != "first_use":
                    times[case] = _quadruples(workers, order, case)
        for case in cases if number else ():
            for kind, pairs_of in enumerate((results[case].process, results[case].children)):
                one, other = ([turn[kind] for turn in turns] for turns in times[case])
                pairs_of.append((sum(one), sum(other)))
    return results


def _quadruples(workers: dict[int, Worker], order: tuple[int, int], case: str) -> list[list[tuple[float, float]]]:
    times: list[list[tuple[float, float]]] = [[], []]
    for worker in workers.values():
        worker.run(case)  # the first run prepares the program
    for _ in range(QUADRUPLES):
        for at in (*order, *reversed(order)):
            times[at].append(measure_run(workers[at], case))
    return times


def count_instructions(checkout: Path, case: str, folder: Path, programs: Path = PROGRAMS) -> int:
    """Return the number of instructions of the client's process in a run of a program.

    Callgrind simulates the preparation as well, so this takes minutes.
    """
    file = folder / "callgrind"
    under = ("valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={file}")
    with closing(Worker(checkout, programs, under)) as worker:
        worker.run(case)
        for switch in ("on", "off"):
            subprocess.run(["callgrind_control", "-i", switch, str(worker.process)], check=True, capture_output=True)
            if switch == "on":
                worker.run(case)
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("totals:"))


def main() -> None:
    """Print a table with one row per program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--case", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--instructions", action="store_true", help="count instructions of the client's process")
    options = parser.parse_args()
    cases = options.case.split(",")
    if unknown := {*cases} - {*CASES}:
        parser.error(f"no program has the name {', '.join(sorted(unknown))}")
    before, after = options.before.resolve(), options.after.resolve()
    if options.instructions:
        _print_instructions(before, after, cases)
        return
    print(
        f"{'program':12}{'client, ms':>12}{'after / before':>26}  {'executor, ms':>12}{'after / before':>26}  no more than 2 % slower"
    )
    for case, compared in compare(before, after, cases, options.pairs).items():
        print(f"{case:12}" + format_row(compared), flush=True)


def format_row(compared: ProgramTimes) -> str:
    """Format times, ratios and verdicts of a program for both processes."""
    cells, verdicts = [], []
    for pairs in (compared.process, compared.children):
        ratio = ratio_of(pairs)
        cells.append(f"{1e3 * statistics.median(one for one, _ in pairs):12.1f}{ratio!s:>26}  ")
        verdicts.append(ratio.verdict)
    return "".join(cells) + f"client: {verdicts[0]}; executor: {verdicts[1]}"


def _print_instructions(before: Path, after: Path, cases: Sequence[str]) -> None:
    print(f"{'program':12}{'instructions before':>22}{'after / before':>16}  no more than 2 % slower")
    for case in cases:
        if case == "first_use":
            continue  # valgrind would take an hour to simulate the imports of PyTorch
        with tempfile.TemporaryDirectory() as folder:
            one, other = (count_instructions(checkout, case, Path(folder)) for checkout in (before, after))
        print(
            f"{case:12}{one:22,}{other / one:16.4f}  client: {'yes' if other / one <= ALLOWED_RATIO else 'no'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
