"""Stored results of PyTorch's test files, and their comparison by test."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from evaluation.pytorch.reasons import reason_of


@attrs.define
class Outcome:
    """Result of one test on one device: `passed`, `failed`, `skipped`, `hangs`, `crashed` or `lost session`."""

    outcome: str
    seconds: float = 0.0
    text: str = ""


@attrs.define
class FileResults:
    """Results of one test file.

    Attributes:
        tests: number of tests in the file. chosen: description of the selected tests.
        cpu: outcomes of the selected tests on the CPU.
        remote: outcomes on the remote device, of tests that passed on the CPU.
    """

    name: str
    tests: int = 0
    chosen: str = "all"
    cpu: dict[str, Outcome] = attrs.field(factory=dict)
    remote: dict[str, Outcome] = attrs.field(factory=dict)

    @classmethod
    def read(cls, folder: Path, name: str) -> FileResults:
        """Return the results in a folder, or empty ones."""
        file = folder / f"{name}.json"
        if not file.exists():
            return cls(name)
        report = json.loads(file.read_text())
        outcomes = {side: {test: Outcome(**o) for test, o in report.pop(side).items()} for side in ("cpu", "remote")}
        return cls(**report, **outcomes)

    def write(self, folder: Path) -> None:
        """Write the results to a folder, replacing earlier ones."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(attrs.asdict(self), indent=1) + "\n")

    def passed_on_cpu(self) -> list[str]:
        """Return the names of the tests that passed on the CPU."""
        return [test for test, outcome in self.cpu.items() if outcome.outcome == "passed"]

    def compared(self) -> list[tuple[str, Outcome, Outcome]]:
        """Return name and both outcomes of each test that passed on the CPU, and ran remotely without being skipped."""
        both = [(t, self.cpu[t], self.remote[t]) for t in self.passed_on_cpu() if t in self.remote]
        return [(t, here, there) for t, here, there in both if there.outcome != "skipped"]

    def failures(self) -> list[tuple[str, Outcome]]:
        """Return tests that pass on the CPU but not remotely."""
        return [(test, there) for test, _, there in self.compared() if there.outcome != "passed"]

    def row(self) -> dict[str, str]:
        """Return the row of the table."""
        compared = self.compared()
        passed_count = sum(there.outcome == "passed" for _, _, there in compared)
        for_cpu = sum(self.remote[t].outcome == "skipped" for t in self.passed_on_cpu() if t in self.remote)
        seconds = [sum(o.seconds for o in side) for side in zip(*((c, r) for _, c, r in compared), strict=True)]
        slower = f"{seconds[1] / seconds[0]:.1f}" if seconds and seconds[0] else ""
        reasons = Counter(reason_of(there.text, there.outcome) for _, there in self.failures())
        return {
            "file": self.name,
            "tests": str(self.tests),
            "run": self.chosen,
            "pass on the CPU": str(len(self.passed_on_cpu())),
            "for the CPU only": str(for_cpu),
            "no time": str(sum(t not in self.remote for t in self.passed_on_cpu())),
            "compared": str(len(compared)),
            "pass here": str(passed_count),
            "share": f"{100 * passed_count / len(compared):.1f}%" if compared else "",
            "times the CPU": slower,
            "reasons": "; ".join(f"{reason} {count}" for reason, count in reasons.most_common()),
        }


def read_all(folder: Path) -> list[FileResults]:
    """Return the results of all files in a folder, by name."""
    return [FileResults.read(folder, file.stem) for file in sorted(folder.glob("*.json"))]


def by_reason(files: Iterable[FileResults]) -> dict[str, dict[str, list[str]]]:
    """Return names of tests that pass only on the CPU, by reason and file; parametrized variants share a line."""
    grouped: dict[str, dict[str, list[str]]] = {}
    for file in files:
        for test, there in file.failures():
            grouped.setdefault(reason_of(there.text, there.outcome), {}).setdefault(file.name, []).append(test)
    return {reason: {name: folded(tests) for name, tests in by.items()} for reason, by in sorted(grouped.items())}


_DTYPES = "bfloat16|float16|float32|float64|complex32|complex64|complex128|bool|uint8|uint16|uint32|uint64|int8|int16|int32|int64"
_PARAMETERS = re.compile(rf"_cpu((?:_(?:{_DTYPES}))*)$")


def folded(tests: Iterable[str]) -> list[str]:
    """Return the names of tests without device and dtype, each followed by the dtypes of its variants."""
    dtypes: dict[str, list[str]] = {}
    for test in tests:
        result = _PARAMETERS.search(test)
        kinds = dtypes.setdefault(test[: result.start()] if result else test, [])
        if result and result[1]:
            kinds.append(result[1][1:])
    return [f"`{name}`" + (f" ({', '.join(kinds)})" if kinds else "") for name, kinds in dtypes.items()]


def markdown(files: Iterable[FileResults]) -> str:
    """Return the table and the exceptions as Markdown."""
    files = list(files)
    rows = [file.row() for file in files]
    columns = list(rows[0]) if rows else []
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
    lines += ["", totals(files), estimates(files)]
    for reason, by_file in by_reason(files).items():
        lines += ["", f"### {reason[0].upper()}{reason[1:]}", ""]
        lines += [f"- {name}: {', '.join(tests)}" for name, tests in by_file.items()]
    return "\n".join(lines)


def totals(files: Iterable[FileResults]) -> str:
    """Return totals over all files."""
    compared = [there for file in files for _, _, there in file.compared()]
    passed_count = sum(there.outcome == "passed" for there in compared)
    share = f" ({100 * passed_count / len(compared):.2f}%)" if compared else ""
    return f"{passed_count:,} of {len(compared):,} tests that pass on the CPU pass on the remote device{share}."


_OTHER_LAYOUTS = frozenset({"test_sparse", "test_sparse_csr", "test_nestedtensor"})


def estimates(files: Iterable[FileResults]) -> str:
    """Return a sentence with estimated shares of passed tests, weighted by the files' numbers of tests."""
    files = list(files)
    strided = [file for file in files if file.name not in _OTHER_LAYOUTS]
    with_them = f", and {_weighted(files):.2f}% with them" if len(strided) < len(files) else ""
    return (
        f"Weighted by the number of tests that each file has, this is an estimated {_weighted(strided):.2f}% without sparse and nested "
        f"tensors{with_them}."
    )


def _weighted(files: Iterable[FileResults]) -> float:
    whole = passed_weight = 0.0
    for file in files:
        outcomes = [there.outcome for _, _, there in file.compared()]
        if outcomes:
            tests = file.tests * len(file.passed_on_cpu()) / len(file.cpu)  # some of these are CPU-only
            whole += tests
            passed_weight += tests * outcomes.count("passed") / len(outcomes)
    return 100 * passed_weight / whole if whole else 0.0


def as_values(files: Iterable[FileResults]) -> dict[str, Any]:
    """Return the results as JSON values."""
    files = list(files)
    return {"files": [file.row() for file in files], "exceptions": by_reason(files), "totals": totals(files)}
