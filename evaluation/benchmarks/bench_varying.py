"""Programs with sizes that change from step to step, over loopback TCP against local eager PyTorch.

    python -m evaluation.benchmarks.bench_varying [--json] [--quick] [--case encoder,bert_plans]

Times are the client process's processor time per step, with wall time beside. For each program:

- `new_over_known`: steps with new sizes, divided by steps with known sizes;
- `late_over_early`: late steps divided by early steps with the same sizes, relative to local PyTorch;
- `plans`: plans made from step 200 on (110 with `--quick`);
- `over_local`, `fixed_over_local`: divided by local PyTorch in alternating blocks, with varying sizes, and with one size.

The encoder also runs with each skeleton of `djinn plugins new` installed, and selected if necessary.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import attrs

import djinn
from djinn_core.cli.plugins import render
from djinn_core.registry.kinds import KINDS
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main
from evaluation.benchmarks.serving import connected
from evaluation.benchmarks.varying_programs import ENCODER, PROGRAMS, Program, Size, Step

REMOTE = "remote_accelerator:0"
BLOCK = 10  # steps per turn
STEPS_BESIDE_A_SKELETON = 600
CHOSEN = {"placement": "placement_policy", "schedulers": "scheduler"}  # settings that select a plugin's object
NEW, LATE, PLANS = 1.3, 1.05, 20
OVER_LOCAL = {"encoder": (3.0, 2.0)}  # bars with varying sizes, and with one size


@attrs.frozen
class StepCosts:
    """Seconds per step: processor time of this process, and wall time."""

    cpu: float
    wall: float


@attrs.frozen
class Length:
    """Numbers of steps: `warm` in the warm-up, `window` compared, `steps` in total."""

    warm: int
    window: int
    steps: int

    @classmethod
    def of(cls, effort: Effort, steps: int = 2000) -> Length:
        """Return the numbers of steps for an effort, at most `steps` in total."""
        if effort.small:
            return cls(4, 4, 20)
        return cls(60, 50, min(steps, 400)) if effort.quick else cls(100, 100, steps)


@attrs.frozen
class Varied:
    """Costs of a program's steps with varying sizes: known and new sizes, early and late steps.

    `early_here`, `late_here`: local costs. `plans`: number of plans made in late steps.
    """

    known: StepCosts
    new: StepCosts
    early: StepCosts
    late: StepCosts
    early_here: StepCosts
    late_here: StepCosts
    plans: int


def blocks(sizes: Iterable[Size], steps: int) -> Iterator[list[Size]]:
    """Yield the sizes of `steps` steps in blocks."""
    remaining = iter(sizes)
    for start in range(0, steps, BLOCK):
        yield [next(remaining) for _ in range(min(BLOCK, steps - start))]


def block(program: Program, step: Step, sizes: Sequence[Size]) -> StepCosts:
    """Return the cost per step of steps with these sizes. Fetch the last result, so that the device is idle afterwards."""
    cpu, wall = time.process_time(), time.perf_counter()
    for number, size in enumerate(sizes, 1):
        result = step(size)
        if number % program.fetched == 0 or number == len(sizes):
            result.tolist()
    return StepCosts((time.process_time() - cpu) / len(sizes), (time.perf_counter() - wall) / len(sizes))


def middle(spent: Sequence[StepCosts]) -> StepCosts:
    """Return the median processor time and the median wall time."""
    return StepCosts(statistics.median(x.cpu for x in spent), statistics.median(x.wall for x in spent))


def in_turns(program: Program, sides: Sequence[Step], sizes: Iterable[Size], steps: int) -> list[StepCosts]:
    """Return the median costs of each side. The sides alternate, and run blocks of steps with equal sizes."""
    results: list[list[StepCosts]] = [[] for _ in sides]
    for turn, inputs in enumerate(blocks(sizes, steps)):
        order = list(zip(sides, results, strict=True))
        for step, seconds_spent in order if turn % 2 else reversed(order):
            seconds_spent.append(block(program, step, inputs))
    return [middle(seconds_spent) for seconds_spent in results]


@functools.cache
def varied(program: Program, effort: Effort, plugin: str = "", chosen: bool = False) -> Varied:
    """Return the costs of a program with varying sizes. Its blocks of steps alternate with those of local PyTorch.

    `plugin`: kind of the plugin skeleton that is installed. `chosen`: True to select it in the settings.
    """
    length = Length.of(effort, STEPS_BESIDE_A_SKELETON) if plugin else Length.of(effort)
    known, unseen = program.halves(length.warm // 2)
    with ExitStack() as stack:
        environment = stack.enter_context(installed(plugin)) if plugin else {}
        settings = {CHOSEN[plugin]: name_of(plugin)} if chosen else {}
        stack.enter_context(connected(threads=effort.threads, environment=environment, **settings))
        there, here = program.start(REMOTE), program.start("cpu")
        for inputs in blocks(itertools.chain(known, program.drawn(known, 1)), length.warm):
            block(program, there, inputs)
            block(program, here, inputs)
        early, early_here = in_turns(program, (there, here), program.drawn(known, 2), length.window)
        plans = djinn.stats()["plans_made"]
        fresh = unseen[: min(length.window // 2, max(BLOCK, len(unseen) // BLOCK * BLOCK))]
        met = itertools.cycle(known)
        pairs = [
            (block(program, there, [next(met) for _ in inputs]), block(program, there, inputs))
            for inputs in blocks(fresh, len(fresh))
        ]
        step_count = length.warm + 2 * length.window + 2 * len(fresh)
        for inputs in blocks(program.drawn(program.sizes, 3), max(0, length.steps - step_count)):
            block(program, there, inputs)
        late, late_here = in_turns(program, (there, here), program.drawn(known, 2), length.window)
        output = djinn.stats()["plans_made"] - plans
    before, after = zip(*pairs, strict=True)
    return Varied(middle(before), middle(after), early, late, early_here, late_here, output)


@functools.cache
def fixed(program: Program, effort: Effort) -> tuple[StepCosts, StepCosts]:
    """Return the costs of remote and local steps with one size, after a warm-up."""
    length = Length.of(effort)
    with connected(threads=effort.threads):
        sides = program.start(REMOTE), program.start("cpu")
        sizes = [program.fixed] * (length.warm + length.window)
        in_turns(program, sides, sizes, length.warm)
        there, here = in_turns(program, sides, sizes, length.window)
    return there, here


@contextmanager
def installed(kind: str) -> Iterator[dict[str, str]]:
    """Install the skeleton of a plugin of this kind for the block. Yield the server's environment variables for it."""
    with tempfile.TemporaryDirectory() as place:
        package = f"djinn_{name_of(kind)}"
        folder = render(name_of(kind), kind, Path(place))
        facts = folder / f"{package}-0.1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: djinn-bench-{kind}\nVersion: 0.1.0\n")
        (facts / "entry_points.txt").write_text(f"[djinn.{kind}]\n{name_of(kind)} = {package}\n")
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        try:
            yield {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
        finally:
            sys.path.remove(str(folder))
            sys.modules.pop(package, None)


def name_of(kind: str) -> str:
    """Return the name of the skeleton of this kind."""
    return f"bench_{kind}"


def quotient(ours: StepCosts, reference: StepCosts) -> Outcome:
    """Return the ratio of processor times, with both costs in milliseconds as figures."""
    figures = {
        "ours ms": ours.cpu,
        "reference ms": reference.cpu,
        "ours wall ms": ours.wall,
        "reference wall ms": reference.wall,
    }
    return Outcome(ours.cpu / reference.cpu, {name: seconds * 1e3 for name, seconds in figures.items()})


def new_over_known(program: Program, effort: Effort, **plugin: object) -> Outcome:
    result = varied(program, effort, **plugin)
    return quotient(result.new, result.known)


def late_over_early(program: Program, effort: Effort) -> Outcome:
    """Return the cost of late steps divided by that of early steps. Divide this by the same ratio of local steps."""
    result = varied(program, effort)
    here = result.late_here.cpu / result.early_here.cpu
    compared = quotient(result.late, result.early)
    return Outcome(compared.value / here, {**compared.figures, "as it is": compared.value, "local": here})


def plans(program: Program, effort: Effort, **plugin: object) -> Outcome:
    return Outcome(varied(program, effort, **plugin).plans)


def over_local(program: Program, effort: Effort) -> Outcome:
    result = varied(program, effort)
    return quotient(result.late, result.late_here)


def fixed_over_local(program: Program, effort: Effort) -> Outcome:
    return quotient(*fixed(program, effort))


def cases_of(program: Program) -> Iterator[Case]:
    """Yield the cases of a program."""
    varying, fixed_sizes = OVER_LOCAL.get(program.name, (None, None))
    yield Case(f"{program.name}_new_over_known", NEW, partial(new_over_known, program))
    yield Case(f"{program.name}_late_over_early", LATE, partial(late_over_early, program))
    yield Case(f"{program.name}_plans", PLANS, partial(plans, program), unit="")
    yield Case(f"{program.name}_over_local", varying, partial(over_local, program))
    yield Case(f"{program.name}_fixed_over_local", fixed_sizes, partial(fixed_over_local, program))


def cases_beside(kind: str, chosen: bool = False) -> Iterator[Case]:
    """Yield the cases of the encoder with a skeleton installed."""
    name, plugin = f"skeleton_{kind}{'_chosen' * chosen}", {"plugin": kind, "chosen": chosen}
    yield Case(f"{name}_new_over_known", NEW, partial(new_over_known, ENCODER, **plugin))
    yield Case(f"{name}_plans", PLANS, partial(plans, ENCODER, **plugin), unit="")


CASES = (
    *(case for program in PROGRAMS for case in cases_of(program)),
    *(case for kind in KINDS for case in cases_beside(kind.name)),
    *(case for kind in CHOSEN for case in cases_beside(kind, chosen=True)),
)

if __name__ == "__main__":
    main("Sizes that change from step to step, over loopback TCP against local eager PyTorch", CASES)
