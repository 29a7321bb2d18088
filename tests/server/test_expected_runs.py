"""Predictions of a session's next submissions, from names of templates alone."""

from __future__ import annotations

import pytest

from djinn_core.wire.messages import Submit
from djinn_server.running.expected_runs import SubmissionPredictor

SECONDS = 0.01  # of a submission


def predictions(templates, slots=lambda _: (), seconds=SECONDS):
    """Return the template that was expected before each submission, or `.` if none was."""
    predictor, found, expected = SubmissionPredictor(), "", "."
    for number, name in enumerate(templates):
        found += expected
        submit = Submit(number + 1, digest=name.encode(), slot_changes=slots(number))
        predictor.add(submit, [], [number << 32], seconds, awaited=False)
        following = predictor.predict(1) if predictor.repeats else None
        expected = following.digest.decode() if following is not None else "."
    return found


@pytest.mark.parametrize(
    ("templates", "expected"),
    [
        ("aaaaaa", "....aa"),
        ("abcabcabcabcabcabc", "............abcabc"),
        ("abcdefghijklmnopqrstuvwxyz", "." * 26),
        # Loops of another length within a longer one: what is known of them stays known.
        ("xyaaaaaaxyaaaaaaa", "......aaa....aaaa"),
        ("xabababababxabababab", ".........aba.....bab"),
        # The same template several times in a step.
        ("abbbc" * 6, ".........b..bb...bb.abbbcabbbc"),
    ],
)
def test_repeated_templates_are_predicted(templates, expected):
    assert predictions(templates) == expected


def test_short_steps_are_not_predicted():
    assert predictions("abababababababab", seconds=1e-5) == "." * 16


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (lambda number: ((number, (0,)),), [8]),
        (lambda number: ((number * 3, (0, 1)),), [24, 24]),
        (lambda _: ((2.5, (1,)),), [0, 2.5]),
        (lambda number: ((number * 0.5, (0,)),), None),
        (lambda number: ((number**2, (0,)),), None),
        (lambda number: ((number, (number % 2,)),), None),
        (lambda number: ((bool(number % 2), (0,)),), None),
    ],
)
def test_linear_slots_are_predicted(slots, expected):
    predictor = SubmissionPredictor()
    for number in range(8):
        submit = Submit(number + 1, digest=b"a", slot_changes=slots(number))
        predictor.add(submit, [], [], SECONDS, awaited=False)
    found = predictor.predict(1)
    assert (found and found.slots([0] * len(expected or [0]))) == expected


def test_repeated_generations_are_predicted():
    """Each generation's first program has new values. Later tokens must still run ahead."""
    predictor, held, number = SubmissionPredictor(), [], 0
    for _ in range(20):
        held.append(0)
        for name in "p" + 40 * "t":
            expected = predictor.predict(1) if predictor.repeats else None
            if expected is not None and expected.digest == b"t" and name == "t":
                predictor.confirm(expected)
                held[-1] += 1
            elif expected is not None:
                predictor.reject(expected, same_template=expected.digest == name.encode())
            number += 1
            predictor.add(Submit(number, digest=name.encode()), [], [number << 32], SECONDS, awaited=True)
    assert min(held[2:]) >= 30, held
