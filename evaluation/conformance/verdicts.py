"""Verdicts on the entries of an operator database, and the list of entries left out, with reasons."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from evaluation.conformance.comparing import Tolerance, check_same, outcome_of
from evaluation.conformance.samples import DEVICE, HERE

# Entries that work on the CPU but not on the remote device, with reasons. An entry that works must be removed.
LEFT_OUT: dict[str, str] = {}

# Runs one sample on the given device, and returns the results to compare.
Program = Callable[[str], Any]
Programs = Iterator[tuple[str, Program]]


@attrs.frozen
class Verdict:
    """Verdict on one entry.

    Attributes:
        outcome: `passed`, `failed`, `left out`, or `none` if the entry is inapplicable.
        reason: the first difference, or the reason for leaving the entry out. error: the exception with the difference.
        samples: number of compared samples. wrong: number of samples that differ.
        refused: number of samples for which both sides raised the same error. late: number of these errors that the remote
            side raised at the fetch.
    """

    name: str
    outcome: str
    reason: str = ""
    error: Exception | None = attrs.field(default=None, repr=False)
    samples: int = 0
    wrong: int = 0
    refused: int = 0
    late: int = 0


def judge(name: str, programs: Iterable[tuple[str, Program]], tolerance: Tolerance) -> Verdict:
    """Run named programs on both devices, and compare the outcomes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # samples are generated lazily
        return _judge(name, programs, tolerance)


def _judge(name: str, programs: Iterable[tuple[str, Program]], tolerance: Tolerance) -> Verdict:
    samples = refusal = late = wrong = 0
    reason, first = "", None
    for which, program in programs:
        expected, actual = outcome_of(program, HERE), outcome_of(program, DEVICE)
        samples += 1
        refusal += expected.error is not None
        late += actual.late
        try:
            check_same(expected, actual, tolerance)
        except Exception as error:
            wrong += 1
            if first is None:
                first, reason = error, f"{which}: {type(error).__name__}: {error}"
    if name in LEFT_OUT and wrong:
        return Verdict(name, "left out", LEFT_OUT[name], first, samples, wrong)
    outcome = "failed" if wrong else "passed" if samples else "none"
    return Verdict(name, outcome, reason, first, samples, wrong, refusal, late)
