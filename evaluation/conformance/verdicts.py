"""Verdicts on the entries of an operator database, and the list of entries left out, with reasons."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from evaluation.conformance.comparing import Tolerance, check_same, outcome_of
from evaluation.conformance.samples import DEVICE, HERE

# The entries that the CPU runs and the remote device does not, and why. One that starts to be right must be taken off.
LEFT_OUT: dict[str, str] = {}

# What is done with one sample on the device that it is given: what it returns is compared.
Program = Callable[[str], Any]
Programs = Iterator[tuple[str, Program]]


@attrs.frozen
class Verdict:
    """Verdict on one entry.

    Attributes:
        outcome: `passed`, `failed`, `left out`, or `none` where the entry has nothing of the kind.
        reason: what differed first, or why it is left out. error: the exception that goes with it.
        samples: how many samples were compared. wrong: how many of them differed.
        refused: for how many both sides raised the same. late: how many of those the remote side raised at the fetch.
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
    """Run programs, each with a name of its own, here and there, and compare what became of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # samples are made while they are asked for
        return _judge(name, programs, tolerance)


def _judge(name: str, programs: Iterable[tuple[str, Program]], tolerance: Tolerance) -> Verdict:
    samples = refused = late = wrong = 0
    reason, first = "", None
    for which, program in programs:
        expected, actual = outcome_of(program, HERE), outcome_of(program, DEVICE)
        samples += 1
        refused += expected.error is not None
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
    return Verdict(name, outcome, reason, first, samples, wrong, refused, late)
