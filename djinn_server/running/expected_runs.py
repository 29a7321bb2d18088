"""Predict a session's next submissions from earlier ones: the template, and the sources of its inputs and slots.

A loop repeats the templates of one step. An input is the same handle each time (a weight), or an output of a submission
a fixed number of submissions earlier (an activation, a growing cache). A slot stays equal, or grows by a constant (a
length). A prediction computes no values. A session without a loop pays one comparison for each submission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import msgspec

from djinn_core.system.lru import LruCache
from djinn_core.wire.binding_delta import Slot, SlotChanges
from djinn_core.wire.messages import Submit

LONGEST_STEP: Final = 64  # submissions
LEAST_SECONDS: Final = 0.0002  # of a step; shorter steps are not worth a prediction
_HELD: Final = 2  # repetitions after which a relation is reliable
_CHANGES: Final = 16  # changes of a relation after which it is given up
_RELATIONS: Final = 256
_MOST_PAUSE: Final = 1024  # submissions
Source = tuple[int, int]  # how many submissions before, and which of its outputs


class PastSubmission(msgspec.Struct):
    """A submission that was run.

    Attributes:
        outputs: handles of the outputs.
        seconds: duration of the run.
        awaited: True if the client waits for fetched values.
    """

    digest: bytes
    outputs: list[int]
    seconds: float
    awaited: bool


class BindingRelation(msgspec.Struct):
    """How inputs and slots of a template follow from earlier submissions, given the preceding template.

    Attributes:
        positions: positions of inputs that vary.
        sources: earlier outputs from which these inputs come; None: not from a recent submission.
        slots: latest changes of slots.
        steps: increment of each slot; None: no constant increment.
        held: number of times that the relation was right.
        changed: number of times that the relation changed.
    """

    positions: tuple[int, ...] = ()
    sources: tuple[Source | None, ...] = ()
    slots: SlotChanges = ()
    steps: tuple[int, ...] | None = ()
    held: int = 0
    changed: int = 0

    @property
    def reliable(self) -> bool:
        """True if the relation gave the right bindings often enough to predict the next ones."""
        return self.held >= _HELD and self.steps is not None and None not in self.sources


class ExpectedSubmission(msgspec.Struct):
    """A predicted submission. `seconds`, `awaited`: values of the corresponding submission one step earlier."""

    digest: bytes
    relation: BindingRelation
    seconds: float
    awaited: bool

    def slots(self, before: Sequence[Slot]) -> list[Slot]:
        """Return the predicted slots. `before`: slots of the template's last run."""
        slots, relation = list(before), self.relation
        assert relation.steps is not None
        for (slot, distances), step in zip(relation.slots, relation.steps, strict=True):
            for position in accumulate(distances):
                slots[position] = slot + step if step else slot
        return slots


class SubmissionPredictor:
    """Predicts the next submissions of one session.

    Attributes:
        repeats: True if the last submissions repeated long enough, and take long enough for predictions.
    """

    def __init__(self) -> None:
        self._past: deque[PastSubmission] = deque(maxlen=2 * LONGEST_STEP)
        self._latest: dict[bytes, int] = {}  # number of a template's latest submission
        self._number = 0
        self._step = 0  # submissions of a step; 0: none is known
        self._repeated = 0  # consecutive submissions that repeated the previous step
        self._wanted = 0  # required repetitions, after failed predictions
        self._seconds = 0.0  # of this step so far
        self._worth = False
        self._relations: LruCache[tuple[bytes, bytes], BindingRelation] = LruCache(_RELATIONS)
        self.repeats = False

    def note(self, submit: Submit, inputs: Sequence[int], outputs: list[int], seconds: float, *, awaited: bool) -> None:
        """Note a finished submission. `inputs`: handles of its template's inputs."""
        past, step, digest = self._past, self._step, submit.digest
        if step and past[-step].digest == digest:
            self._repeated += 1
            if self._repeated < step:
                self._find_shorter_step(digest)
        else:
            self._find_step(digest)
        step = self._step
        if self._worth and self._repeated:
            self._learn((past[-1].digest, digest), submit, inputs)
        past.append(PastSubmission(digest, outputs, seconds, awaited))
        self._latest[digest] = self._number = self._number + 1
        self._seconds += seconds
        if step and not self._repeated % step:
            self._worth, self._seconds = self._seconds >= LEAST_SECONDS, 0.0
        self.repeats = self._worth and 0 < step <= self._repeated >= self._wanted

    def _find_step(self, digest: bytes) -> None:
        """Search for a new length of the loop's step, because the last submissions do not repeat the current step."""
        if len(self._latest) > 4 * LONGEST_STEP:
            least = self._number - LONGEST_STEP
            self._latest = {digest: number for digest, number in self._latest.items() if number > least}
        step = self._number + 1 - self._latest.get(digest, 0)
        self._step, self._repeated, self._worth = 0, 0, False
        if digest in self._latest and step <= min(LONGEST_STEP, len(self._past)):
            self._begin_step(step, 1 + self._repetitions(step))

    def _find_shorter_step(self, digest: bytes) -> None:
        """Search for a shorter step, such as the step of an inner loop."""
        step = self._number + 1 - self._latest[digest]
        if step < self._step and (repetitions := self._repetitions(step)) >= step:
            self._begin_step(step, 1 + repetitions)

    def _repetitions(self, step: int) -> int:
        """Return how many of the last submissions, in a row, equal the submission `step` earlier."""
        past = self._past
        for distance in range(1, len(past) - step + 1):
            if past[-distance].digest != past[-distance - step].digest:
                return distance - 1
        return len(past) - step

    def _begin_step(self, step: int, repeated: int) -> None:
        self._step, self._repeated, self._seconds = step, repeated, 0.0
        self._worth = sum([self._past[-distance].seconds for distance in range(1, step + 1)]) >= LEAST_SECONDS

    def _learn(self, key: tuple[bytes, bytes], submit: Submit, inputs: Sequence[int]) -> None:
        relation = self._relations.get(key)
        if relation is None:
            relation = BindingRelation(changed=-1)
            self._relations.store(key, relation)
        if submit.first is not None:
            relation.held = 0
        elif relation.held < _HELD and relation.changed < _CHANGES:
            positions = tuple(accumulate(submit.input_changes[::3]))
            sources = tuple([self._source(inputs[position]) for position in positions])
            if (positions, sources) == (relation.positions, relation.sources) and relation.changed >= 0:
                relation.held += 1
            else:
                relation.positions, relation.sources, relation.held = positions, sources, 0
                relation.changed += 1
        if submit.slot_changes or relation.slots:
            steps = _steps(relation.slots, submit.slot_changes)
            if steps != relation.steps:
                relation.held = min(relation.held, _HELD - 1)
            relation.slots, relation.steps = submit.slot_changes, steps

    def _source(self, handle: int) -> Source | None:
        for distance, before in enumerate(reversed(self._past), 1):
            if distance > 2 * self._step:
                return None
            if handle in before.outputs:
                return distance, before.outputs.index(handle)
        return None

    def expected(self, number: int) -> ExpectedSubmission | None:
        """Predict the submission that follows after `number` - 1 further ones. Return None if it is not predictable."""
        past, step = self._past, self._step
        at = (number - 1) % step - step
        submission = past[at]
        before = past[at - 1] if number > 1 and at > -step else past[-1]
        relation = self._relations.get((before.digest, submission.digest))
        if relation is None or not relation.reliable:
            return None
        return ExpectedSubmission(submission.digest, relation, submission.seconds, submission.awaited)

    def output(self, source: Source) -> int:
        """Return the handle of an output of an earlier submission. `source`: distance and number of the output."""
        distance, number = source
        return self._past[-distance].outputs[number]

    def held(self, expected: ExpectedSubmission) -> None:
        """Note that a prediction was right."""
        expected.relation.changed = 0
        self._wanted //= 2

    def missed(self, expected: ExpectedSubmission, *, same_template: bool) -> None:
        """Note that a prediction was wrong. The next one needs more repetitions.

        `same_template`: True if the expected template arrived with other inputs or slots.
        """
        if same_template:
            expected.relation.held = 0
            expected.relation.changed += 1
        self._wanted = min(2 * max(self._wanted, 1), _MOST_PAUSE)
        self._repeated = 0
        self.repeats = False


def _steps(before: SlotChanges, now: SlotChanges) -> tuple[int, ...] | None:
    """Return the increments of the changed slots. Return None if other slots changed, or if one is not an integer."""
    if len(before) != len(now):
        return None
    steps: list[int] = []
    for (old, places), (new, places_now) in zip(before, now, strict=True):
        if places != places_now or type(old) is not type(new):
            return None
        if isinstance(old, int) and isinstance(new, int) and not isinstance(old, bool):
            steps.append(new - old)
        elif old != new or not new:
            return None
        else:
            steps.append(0)
    return tuple(steps)
