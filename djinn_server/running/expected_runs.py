"""Predict a session's next submissions from earlier ones: the template, and the sources of its inputs and slots.

A step is the sequence of submissions that a client's loop repeats. An input is the same handle in each step (a weight),
or an output of a submission at a fixed distance before (an activation, a growing cache). A slot stays equal, or grows by
a constant (a length). A prediction computes no values. A session without a loop pays one comparison for each submission.
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

MAX_STEP: Final = 64  # submissions
MIN_STEP_SECONDS: Final = 0.0002  # predictions for shorter steps cost more than they save
_MIN_HITS: Final = 2  # repetitions after which a relation is reliable
_MAX_CHANGES: Final = 16  # changes of a relation after which it is given up
_MAX_RELATIONS: Final = 256
_MAX_REPETITIONS: Final = 1024  # submissions that must repeat after many wrong predictions
Source = tuple[int, int]  # distance to an earlier submission in submissions, and the number of its output


class PastSubmission(msgspec.Struct):
    """A submission that was run.

    Attributes:
        digest: digest of the template.
        outputs: handles of the outputs.
        seconds: duration of the run.
        awaited: True if the client waits for fetched values.
    """

    digest: bytes
    outputs: list[int]
    seconds: float
    awaited: bool


class BindingRelation(msgspec.Struct):
    """How the inputs and slots of a template follow from earlier submissions, if a certain template ran just before.

    Attributes:
        positions: positions of the inputs that differ from the template's last run.
        sources: earlier output from which each of these inputs comes; None if it is no output of a recent submission.
        slots: latest changes of slots.
        increments: last increment of each changed slot; None if different slots changed, or a non-integer.
        hits: number of successive submissions for which the relation was right.
        changes: number of times that the relation changed.
    """

    positions: tuple[int, ...] = ()
    sources: tuple[Source | None, ...] = ()
    slots: SlotChanges = ()
    increments: tuple[int, ...] | None = ()
    hits: int = 0
    changes: int = 0

    @property
    def is_reliable(self) -> bool:
        """True if the relation was right often enough to predict the next bindings (inputs and slots)."""
        return self.hits >= _MIN_HITS and self.increments is not None and None not in self.sources


class ExpectedSubmission(msgspec.Struct):
    """A predicted submission.

    Attributes:
        digest: digest of the template.
        relation: how the inputs and slots follow from earlier submissions.
        seconds, awaited: duration and `awaited` of the corresponding submission one step earlier.
    """

    digest: bytes
    relation: BindingRelation
    seconds: float
    awaited: bool

    def slots(self, before: Sequence[Slot]) -> list[Slot]:
        """Return the predicted slots. `before`: slots of the template's last run."""
        slots, relation = list(before), self.relation
        assert relation.increments is not None
        for (slot, distances), increment in zip(relation.slots, relation.increments, strict=True):
            for position in accumulate(distances):
                slots[position] = slot + increment if increment else slot
        return slots


class SubmissionPredictor:
    """Predicts the next submissions of one session.

    Attributes:
        repeats: True if `predict` may be called: the last submissions repeat a step that takes long enough.
    """

    def __init__(self) -> None:
        self._past: deque[PastSubmission] = deque(maxlen=2 * MAX_STEP)
        self._latest: dict[bytes, int] = {}  # number of a template's latest submission
        self._submission_count = 0
        self._step = 0  # number of submissions in a step; 0: no step was found
        self._repetition_count = 0  # consecutive submissions that repeated the previous step
        self._required_repetitions = 0  # larger after wrong predictions
        self._seconds = 0.0  # duration of this step's submissions so far
        self._is_worthwhile = False
        self._relations: LruCache[tuple[bytes, bytes], BindingRelation] = LruCache(_MAX_RELATIONS)
        self.repeats = False

    def add(self, submit: Submit, inputs: Sequence[int], outputs: list[int], seconds: float, *, awaited: bool) -> None:
        """Add a finished submission.

        Args:
            submit: the client's message.
            inputs: handles of the template's inputs.
            outputs: handles of the template's outputs.
            seconds: duration of the run.
            awaited: True if the client waits for fetched values.
        """
        past, step, digest = self._past, self._step, submit.digest
        if step and past[-step].digest == digest:
            self._repetition_count += 1
            if self._repetition_count < step:
                self._find_shorter_step(digest)
        else:
            self._find_step(digest)
        step = self._step
        if self._is_worthwhile and self._repetition_count:
            self._learn((past[-1].digest, digest), submit, inputs)
        past.append(PastSubmission(digest, outputs, seconds, awaited))
        self._latest[digest] = self._submission_count = self._submission_count + 1
        self._seconds += seconds
        if step and not self._repetition_count % step:
            self._is_worthwhile, self._seconds = self._seconds >= MIN_STEP_SECONDS, 0.0
        self.repeats = self._is_worthwhile and 0 < step <= self._repetition_count >= self._required_repetitions

    def _find_step(self, digest: bytes) -> None:
        """Search for a new length of the loop's step, because the last submissions do not repeat the current step."""
        if len(self._latest) > 4 * MAX_STEP:
            least = self._submission_count - MAX_STEP
            self._latest = {digest: number for digest, number in self._latest.items() if number > least}
        step = self._submission_count + 1 - self._latest.get(digest, 0)
        self._step, self._repetition_count, self._is_worthwhile = 0, 0, False
        if digest in self._latest and step <= min(MAX_STEP, len(self._past)):
            self._begin_step(step, 1 + self._repetitions(step))

    def _find_shorter_step(self, digest: bytes) -> None:
        """Search for a shorter step, such as that of an inner loop. `digest`: template of the new submission."""
        step = self._submission_count + 1 - self._latest[digest]
        if step < self._step and (repetitions := self._repetitions(step)) >= step:
            self._begin_step(step, 1 + repetitions)

    def _repetitions(self, step: int) -> int:
        """Return how many successive submissions, up to the latest, have the template of the one `step` earlier."""
        past = self._past
        for distance in range(1, len(past) - step + 1):
            if past[-distance].digest != past[-distance - step].digest:
                return distance - 1
        return len(past) - step

    def _begin_step(self, step: int, repeated: int) -> None:
        self._step, self._repetition_count, self._seconds = step, repeated, 0.0
        self._is_worthwhile = (
            sum([self._past[-distance].seconds for distance in range(1, step + 1)]) >= MIN_STEP_SECONDS
        )

    def _learn(self, key: tuple[bytes, bytes], submit: Submit, inputs: Sequence[int]) -> None:
        relation = self._relations.get(key)
        if relation is None:
            relation = BindingRelation(changes=-1)
            self._relations.store(key, relation)
        if submit.first is not None:
            relation.hits = 0
        elif relation.hits < _MIN_HITS and relation.changes < _MAX_CHANGES:
            positions = tuple(accumulate(submit.input_changes[::3]))
            sources = tuple([self._source(inputs[position]) for position in positions])
            if (positions, sources) == (relation.positions, relation.sources) and relation.changes >= 0:
                relation.hits += 1
            else:
                relation.positions, relation.sources, relation.hits = positions, sources, 0
                relation.changes += 1
        if submit.slot_changes or relation.slots:
            increments = _increments(relation.slots, submit.slot_changes)
            if increments != relation.increments:
                relation.hits = min(relation.hits, _MIN_HITS - 1)
            relation.slots, relation.increments = submit.slot_changes, increments

    def _source(self, handle: int) -> Source | None:
        for distance, before in enumerate(reversed(self._past), 1):
            if distance > 2 * self._step:
                return None
            if handle in before.outputs:
                return distance, before.outputs.index(handle)
        return None

    def predict(self, number: int) -> ExpectedSubmission | None:
        """Return a prediction of the `number`-th next submission, counted from 1, or None if it is not predictable."""
        past, step = self._past, self._step
        at = (number - 1) % step - step
        submission = past[at]
        before = past[at - 1] if number > 1 and at > -step else past[-1]
        relation = self._relations.get((before.digest, submission.digest))
        if relation is None or not relation.is_reliable:
            return None
        return ExpectedSubmission(submission.digest, relation, submission.seconds, submission.awaited)

    def output(self, source: Source) -> int:
        """Return the handle of an output of an earlier submission. `source`: its distance, and the output's number."""
        distance, number = source
        return self._past[-distance].outputs[number]

    def confirm(self, expected: ExpectedSubmission) -> None:
        """Record that a prediction was right, so that the next predictions need fewer repetitions."""
        expected.relation.changes = 0
        self._required_repetitions //= 2

    def reject(self, expected: ExpectedSubmission, *, same_template: bool) -> None:
        """Record that a prediction was wrong, so that the next predictions need more repetitions.

        `same_template`: True if the expected template arrived, but with other inputs or slots.
        """
        if same_template:
            expected.relation.hits = 0
            expected.relation.changes += 1
        self._required_repetitions = min(2 * max(self._required_repetitions, 1), _MAX_REPETITIONS)
        self._repetition_count = 0
        self.repeats = False


def _increments(before: SlotChanges, after: SlotChanges) -> tuple[int, ...] | None:
    """Return the increments of the changed slots from `before` to `after`, which are successive changes of one template.

    Return None if they change different slots, or if a number that is not an integer changes.
    """
    if len(before) != len(after):
        return None
    increments: list[int] = []
    for (old, places), (new, places_now) in zip(before, after, strict=True):
        if places != places_now or type(old) is not type(new):
            return None
        if isinstance(old, int) and isinstance(new, int) and not isinstance(old, bool):
            increments.append(new - old)
        elif old != new or not new:
            return None
        else:
            increments.append(0)
    return tuple(increments)
