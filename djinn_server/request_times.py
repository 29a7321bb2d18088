"""Latency of a session's requests: time to an answer, time to first token, time per token.

A server sees submissions, not requests. It uses these definitions:

- An answer is a submission whose reply has a tensor. The client waits for it.
- A generation is a prefill that is followed by a decode step. A decode step has attention with one query; a prefill has
  attention with several queries.
- The first answer of a generation has its first token. Each later answer has one token for each decode step since the
  answer before. A batch of several sequences counts once.
- A request is a generation, or an answer outside of generations.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Final

import attrs

from djinn_core.wire.executor_reports import Distribution
from djinn_core.wire.messages import Latency, ServingFigures, Workload
from djinn_server.histogram import Histogram

RECENT: Final = 512  # latest durations, of which percentiles are computed
MODELS_LIMIT: Final = 32  # models with figures of their own
OTHER_MODELS: Final = "other"
NAMES: Final = ("request_duration_seconds", "first_token_seconds", "token_seconds")
ANSWERS_LIMIT: Final = 16  # after a prefill; with more, it does not begin a generation


class ModelNames:
    """Labels for the names of models: the first `MODELS_LIMIT` names.

    Clients choose the names. A name keeps its label, so counters never decrease.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def label(self, name: str) -> str:
        """Return `name` if it is one of the first names, else `OTHER_MODELS`."""
        with self._lock:
            if len(self._names) < MODELS_LIMIT and name != OTHER_MODELS:
                self._names.add(name)
            return name if name in self._names else OTHER_MODELS


@attrs.define(eq=False)
class _Durations:
    """Durations of one kind: a histogram of all of them, and the `RECENT` latest."""

    histogram: Histogram = attrs.field(factory=Histogram)
    recent: deque[float] = attrs.field(factory=lambda: deque(maxlen=RECENT))

    def add(self, seconds: float, times: int = 1) -> None:
        self.histogram.add([seconds] * times)
        self.recent.append(seconds)

    def include(self, other: _Durations) -> None:
        self.histogram.include(other.histogram)
        self.recent.extend(list(other.recent))

    def latency(self) -> Latency:
        durations = sorted(list(self.recent))  # noqa: C414 - the session's thread may append meanwhile
        if not durations:
            return Latency()
        return Latency(durations[len(durations) // 2], durations[min(len(durations) - 1, len(durations) * 99 // 100)])


@attrs.define(eq=False)
class ModelTimes:
    """Durations of requests to one model.

    Attributes:
        requests: number of requests, generations included.
        answers: time from the arrival of a submission to its answer, outside of generations.
        first_tokens: time from the arrival of the first prefill submission to the first answer.
        tokens: time between two answers of a generation, divided by the number of tokens.
    """

    requests: int = 0
    answers: _Durations = attrs.field(factory=_Durations)
    first_tokens: _Durations = attrs.field(factory=_Durations)
    tokens: _Durations = attrs.field(factory=_Durations)

    def add_answer(self, seconds: float) -> None:
        """Add the duration of an answer outside of generations."""
        self.requests += 1
        self.answers.add(seconds)

    def add_first_token(self, seconds: float) -> None:
        """Add the time to the first token of a generation, and count the generation."""
        self.requests += 1
        self.first_tokens.add(seconds)

    def include(self, other: ModelTimes) -> None:
        """Add the durations of `other`, which are of another model or session."""
        self.requests += other.requests
        for own_durations, other_durations in zip(self._durations(), other._durations(), strict=True):
            own_durations.include(other_durations)

    def figures(self, model: str) -> ServingFigures:
        """Return counts, and medians and 99th percentiles of the durations, so far. `model`: name in the figures."""
        tokens = self.tokens.histogram.count + self.first_tokens.histogram.count
        return ServingFigures(model, self.requests, tokens, *[durations.latency() for durations in self._durations()])

    def distributions(self, model: str) -> Mapping[str, Distribution]:
        """Return the histograms by their names in `/metrics`. `model`: their label."""
        return {
            name: durations.histogram.distribution(model)
            for name, durations in zip(NAMES, self._durations(), strict=True)
        }

    def _durations(self) -> tuple[_Durations, _Durations, _Durations]:
        return self.answers, self.first_tokens, self.tokens


@attrs.define(eq=False)
class _Prefill:
    """A prefill that may begin a generation.

    Attributes:
        arrived: time at which its first submission arrived, in seconds.
        times: durations of requests to the model.
        answers: times of arrival and completion of the answered submissions since the prefill.
        decodes: True after a decode step has followed the prefill.
    """

    arrived: float
    times: ModelTimes
    answers: list[tuple[float, float]] = attrs.field(factory=list)
    decodes: bool = False


@attrs.define(eq=False)
class _Generation:
    """A generation after its first token. `last`: time of its latest answer. `steps`: decode steps since then."""

    times: ModelTimes
    last: float
    steps: int = 0


class RequestTimes:
    """Durations of a session's requests by model. Only the session's thread adds to them.

    Attributes:
        by_model: durations by label of the model.
        model: the client's name of the model that ran last.
    """

    def __init__(self, names: ModelNames) -> None:
        """`names`: labels of models, shared by all sessions of the executor."""
        self._names = names
        self.by_model: dict[str, ModelTimes] = {}
        self.model = ""
        self._prefill: _Prefill | None = None
        self._generation: _Generation | None = None

    def ran(self, workload: Workload | None, arrival_time: float, end_time: float, *, answers: bool) -> None:
        """Note a finished submission. `arrival_time`, `end_time`: times of its arrival and its completion, in seconds.

        `workload`: model and queries of its template, or None. `answers`: True if the reply has a tensor.
        """
        if workload is not None:
            self.model = workload.model or self.model
            if workload.queries == 1:
                self._decode(arrival_time)
            else:
                self._begin(arrival_time if workload.queries else None)
        if answers:
            self._answer(arrival_time, end_time)

    def close(self) -> None:
        """Count prefills that still wait for a decode step, because the session ends."""
        self._begin(None)

    def _begin(self, prefill: float | None) -> None:
        """End the generation, or count answers since a prefill without one. `prefill`: arrival of the next, or None."""
        self._generation = None
        if self._prefill is not None:
            if prefill is not None and not self._prefill.answers:
                return  # another part of the same prompt
            for start, end in self._prefill.answers:
                self._prefill.times.add_answer(end - start)
        self._prefill = _Prefill(prefill, self._times()) if prefill is not None else None

    def _decode(self, arrival_time: float) -> None:
        if self._generation is None:
            if self._prefill is None:  # a prompt of one token
                self._prefill = _Prefill(arrival_time, self._times())
            self._prefill.decodes = True
            if self._prefill.answers:
                self._first_token(self._prefill, self._prefill.answers[0][1])
        if self._generation is not None:
            self._generation.steps += 1

    def _first_token(self, prefill: _Prefill, end_time: float) -> None:
        self._prefill = None
        self._generation = _Generation(prefill.times, end_time)
        prefill.times.add_first_token(end_time - prefill.arrived)

    def _answer(self, arrival_time: float, end_time: float) -> None:
        prefill, generation = self._prefill, self._generation
        if generation is not None:
            if generation.steps:  # otherwise a second answer has the same token
                generation.times.tokens.add((end_time - generation.last) / generation.steps, generation.steps)
                generation.last, generation.steps = end_time, 0
        elif prefill is None:
            self._times().add_answer(end_time - arrival_time)
        elif prefill.decodes:
            self._first_token(prefill, end_time)
        else:
            prefill.answers.append((arrival_time, end_time))
            if len(prefill.answers) >= ANSWERS_LIMIT:
                self._begin(None)

    def _times(self) -> ModelTimes:
        latest = self.by_model.get(self.model)
        if latest is None:
            latest = self.by_model.setdefault(self._names.label(self.model), ModelTimes())
        return latest

    def figures(self) -> ServingFigures:
        """Return figures of all models of the session, under the name of the latest model."""
        total = ModelTimes()
        for times in list(self.by_model.values()):
            total.include(times)
        return total.figures(self.model)


def include_models(totals: dict[str, ModelTimes], session_times: Mapping[str, ModelTimes]) -> None:
    """Add the durations of a session, by model, to `totals`, which are those of its executor."""
    for model, times in list(session_times.items()):
        totals.setdefault(model, ModelTimes()).include(times)
