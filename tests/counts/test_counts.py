"""Pinned counts: messages, waits, submissions and bytes of programs. A change must not raise a count; lower the pin with the count.

Timing does not affect counts in sessions without recovery (recovery sends acknowledgements by time) and without `late_stop` (which
polls for replies). Replies may be longer on some machines, because they report free memory.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

import attrs
import pytest
from long_forms import LONG

from evaluation.rivals.counting import PROGRAMS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "examples"
CLUSTER = ROOT / "evaluation" / "rivals" / "gpu.toml"
VERSIONS = {"torch": "2.13", "transformers": "5.23"}  # other versions record other ops
# transformers touches a deprecated alias in torch while it is imported.
WARNINGS = ["-W", "error", "-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning"]
ROOM_BYTES = 10  # of a reply's report of free memory
WITHOUT_TIMING = {"DJINN_RECOVER": "0", "DJINN_DISABLE": "late_stop"}


@attrs.frozen
class Counts:
    """Counts of a program, named as in `djinn.stats()`. `bytes_beyond`: bytes sent besides tensors (`bytes_uploaded`)."""

    messages_sent: int
    messages_received: int
    round_trips: int
    submissions: int
    bytes_uploaded: int
    bytes_beyond: int
    bytes_received: int

    @classmethod
    def of(cls, stats: Mapping[str, int]) -> Counts:
        """Return the counts in a result of `djinn.stats()`."""
        beyond = stats["bytes_sent"] - stats["bytes_uploaded"]
        return cls(**{name: stats[name] for name in NAMES if name != "bytes_beyond"}, bytes_beyond=beyond)

    @classmethod
    def of_one(cls, figures: Mapping[str, int]) -> Counts:
        """Return the counts of one repetition of a phase, rounded up."""
        return cls.of({name: math.ceil(value / figures["repetitions"]) for name, value in figures.items()})

    def counts_above(self, pin: Counts, names: Collection[str]) -> dict[str, str]:
        """Return the counts of `names` that exceed `pin`, with an explanation."""
        pairs = {name: (getattr(self, name), getattr(pin, name)) for name in names}
        return {name: f"{count:,}, pinned at {most:,}" for name, (count, most) in pairs.items() if count > most}


NAMES = tuple(field.name for field in attrs.fields(Counts))
WITHOUT_BYTES = tuple(name for name in NAMES if not name.startswith("bytes"))
EXAMPLES = {
    # The reply to `torch.cuda.mem_get_info` holds figures of the machine, of up to nine bytes each.
    # `StatsRequest` has two flags, of a byte each.
    "cuda_matmul": Counts(4, 3, 2, 2, 1_048_576, 1_198, 646),
    "generate": Counts(71, 29, 18, 29, 2_623_568, 35_038, 3_304),
    "train": Counts(25, 15, 11, 15, 1_288, 58_508, 1_764),
}
# Of one repetition of each phase, by program.
RIVALS = {
    "nanogpt": {"20 iterations": Counts(84, 5, 5, 5, 42_990_592, 168_900, 660)},
    "resnet18": {
        "step, batch on the device": Counts(1, 1, 1, 1, 0, 328, 131),
        "step, new pictures": Counts(3, 1, 1, 1, 24_592, 490, 131),
    },
    "gpt2": {
        "first call": Counts(72, 65, 65, 65, 24, 28_400, 8_738),
        "second call": Counts(71, 64, 64, 64, 24, 14_800, 8_625),
    },
    "llama7b": {
        "first call": Counts(72, 65, 65, 65, 24, 33_900, 9_500),
        "second call": Counts(72, 65, 65, 65, 24, 16_300, 9_500),
    },
    "diffusion": {
        "first call": Counts(53, 3, 1, 3, 400, 404_200, 8_802),
        "second call": Counts(53, 3, 1, 3, 400, 34_500, 4_569),
    },
}
PUBLISHED_SIZES = {  # with LONG_FORMS: the batch sizes that rivals publish
    "nanogpt": ((64, 256), {"20 iterations": Counts(84, 5, 5, 5, 48_223_232, 179_900, 660)}),
    "resnet18": (
        (1, 224),
        {
            "step, batch on the device": Counts(1, 1, 1, 1, 0, 328, 131),
            "step, new pictures": Counts(3, 1, 1, 1, 602_120, 490, 131),
        },
    ),
}


@pytest.fixture
def count_program(python, plain_environment, tmp_path):
    """Return a function that runs a program in a new process. It returns the program's counts and output."""

    def count_program(program, *arguments, **environment):
        cuda = program.stem.startswith("cuda_")  # a script that knows CUDA only
        command = ["-m", "djinn_core.cli", "run"] if cuda else []
        command += [HERE / "counting.py", program, *map(str, arguments)]
        done = python.run(*WARNINGS, *command, cwd=tmp_path, env=plain_environment | environment)
        assert done.returncode == 0, done.stderr[-2000:]
        printed, _, last = done.stdout.strip().rpartition("\n")
        return Counts.of(json.loads(last)), printed

    return count_program


def assert_within(counts, pin, names=NAMES):
    for package, version in VERSIONS.items():
        if not importlib.metadata.version(package).startswith(f"{version}."):
            pytest.skip(f"counts are pinned for {package} {version}")
    told = pin.bytes_received + ROOM_BYTES * pin.messages_received
    assert not counts.counts_above(attrs.evolve(pin, bytes_received=told), names)


def test_every_example_has_a_pin():
    runs_on = {"model_server"}  # a server; tests/e2e/test_model_server.py runs it
    assert set(EXAMPLES) == {path.stem for path in FOLDER.glob("*.py")} - runs_on


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_stays_within_its_pin(name, count_program):
    counts, _ = count_program(FOLDER / f"{name}.py", **WITHOUT_TIMING)
    assert_within(counts, EXAMPLES[name])


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_with_default_settings_stays_within_its_pinned_waits(name, count_program):
    counts, printed = count_program(FOLDER / f"{name}.py")
    assert ("cuda:0" if name.startswith("cuda_") else "round trips") in printed
    assert_within(counts, EXAMPLES[name], WITHOUT_BYTES)


@pytest.fixture
def count_phases(python, plain_environment, tmp_path):
    """Return a function that runs a program of `evaluation.rivals` in a new process.

    It returns the counts of one repetition of each phase.
    """

    def count_phases(name, *sizes, **environment):
        command = ["-W", "ignore", "-m", "evaluation.rivals.counting", name, *map(str, sizes)]
        simulated = {"DJINN_DEVICE": "simulated", "DJINN_PLUGIN_SIMULATED_CLUSTER": str(CLUSTER)}
        given = simulated if PROGRAMS[name].device.startswith("simulated") else {}
        done = python.run(*command, cwd=ROOT, env=plain_environment | given | environment)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return {phase: Counts.of_one(figures) for phase, figures in found.items()}

    return count_phases


def test_every_program_of_the_comparison_has_a_pin():
    assert set(RIVALS) == set(PROGRAMS)


SIMULATED = pytest.mark.skipif(
    not LONG, reason="LONG_FORMS: the simulated device takes seconds, and GPT-2's counts are the same"
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SIMULATED) if name == "llama7b" else name for name in RIVALS]
)
def test_program_of_the_comparison_stays_within_its_pin(name, count_phases):
    counts = count_phases(name, "--small", **WITHOUT_TIMING)
    assert set(counts) == set(RIVALS[name])
    for phase, pin in RIVALS[name].items():
        assert_within(counts[phase], pin)


@pytest.mark.skipif(not LONG, reason="LONG_FORMS: minutes")
@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_program_of_published_size_stays_within_its_pin(name, count_phases):
    sizes, pins = PUBLISHED_SIZES[name]
    counts = count_phases(name, "--sizes", *sizes, **WITHOUT_TIMING)
    for phase, pin in pins.items():
        assert_within(counts[phase], pin)
