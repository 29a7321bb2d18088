"""Pinned counts: messages, waits, submissions and bytes of programs. A change must not raise a count; lower the pin with the count.

Timing does not affect counts in sessions without recovery (recovery sends acknowledgements by time) and without `late_stop` (which
polls for replies). Replies may be longer on some machines, because they report free memory.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import attrs
import pytest
from long_forms import long_or

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "examples"
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

    def above(self, pin: Counts, names: Collection[str]) -> dict[str, str]:
        """Return the counts of `names` that exceed `pin`, with an explanation."""
        pairs = {name: (getattr(self, name), getattr(pin, name)) for name in names}
        return {name: f"{count:,}, pinned at {most:,}" for name, (count, most) in pairs.items() if count > most}


NAMES = tuple(field.name for field in attrs.fields(Counts))
WITHOUT_BYTES = tuple(name for name in NAMES if not name.startswith("bytes"))
EXAMPLES = {
    # The reply to `torch.cuda.mem_get_info` holds figures of the machine, of up to nine bytes each.
    "cuda_matmul": Counts(4, 3, 2, 2, 1_048_576, 1_197, 600),
    "generate": Counts(71, 29, 18, 29, 2_623_568, 35_038, 3_304),
    "train": Counts(25, 15, 11, 15, 1_288, 58_508, 1_764),
}
NANOGPT = {  # by batch and sequence
    (2, 16): Counts(86, 5, 5, 5, 42_990_592, 168_741, 660),
    (64, 256): Counts(86, 5, 5, 5, 48_223_232, 179_669, 660),
}
RESNET18 = {  # by batch and pixels
    (2, 32): Counts(227, 52, 20, 52, 47_288_448, 80_901, 5_202),
    (16, 224): Counts(267, 52, 20, 52, 239_475_008, 85_394, 5_202),  # a batch takes three messages
}


@pytest.fixture
def counted(python, plain_environment, tmp_path):
    """Run a program in a new process. Return its counts and its output."""

    def counted(program, *arguments, **environment):
        cuda = program.stem.startswith("cuda_")  # a script that knows CUDA only
        command = ["-m", "djinn_core.cli", "run"] if cuda else []
        command += [HERE / "counting.py", program, *map(str, arguments)]
        done = python.run(*WARNINGS, *command, cwd=tmp_path, env=plain_environment | environment)
        assert done.returncode == 0, done.stderr[-2000:]
        printed, _, last = done.stdout.strip().rpartition("\n")
        return Counts.of(json.loads(last)), printed

    return counted


def assert_within(counts, pin, names=NAMES):
    for package, version in VERSIONS.items():
        if not importlib.metadata.version(package).startswith(f"{version}."):
            pytest.skip(f"counts are pinned for {package} {version}")
    told = pin.bytes_received + ROOM_BYTES * pin.messages_received
    assert not counts.above(attrs.evolve(pin, bytes_received=told), names)


def test_every_example_has_a_pin():
    assert set(EXAMPLES) == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_stays_within_its_pin(name, counted):
    counts, _ = counted(FOLDER / f"{name}.py", **WITHOUT_TIMING)
    assert_within(counts, EXAMPLES[name])


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_with_default_settings_stays_within_its_pinned_waits(name, counted):
    counts, printed = counted(FOLDER / f"{name}.py")
    assert ("cuda:0" if name.startswith("cuda_") else "round trips") in printed
    assert_within(counts, EXAMPLES[name], WITHOUT_BYTES)


def test_nanogpt_waits_only_for_the_losses_that_it_reads(counted):
    sizes = long_or((2, 16), (64, 256))
    counts, _ = counted(HERE / "nanogpt.py", *sizes, **WITHOUT_TIMING)
    assert_within(counts, NANOGPT[sizes])


def test_resnet18_waits_once_a_step(counted):
    sizes = long_or((2, 32), (16, 224))
    counts, _ = counted(HERE / "resnet18.py", *sizes, **WITHOUT_TIMING)
    assert_within(counts, RESNET18[sizes])
