"""Base of the run strategies that replace hot templates: one record for each template of a device."""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from djinn_server.hookspecs.run_strategies import RunOffer, RunStrategy, TemplateFacts
from djinn_server.running.arbiter import ServedFacts
from djinn_strategies.compiling.hot_template import CompilationCounters, CompilationJob, HotTemplate, Phase, Thresholds


class HotTemplates(RunStrategy):
    """Counts the runs of all templates on a device, and replaces the hot ones.

    Attributes:
        counts: counters since the executor began.
        skipped, maybe_dynamic: ops that it may run among others, as for `find_region`.
        counters: as for `infer_size_relation`.
    """

    skipped: ClassVar[frozenset[str]] = frozenset()
    maybe_dynamic: ClassVar[frozenset[str]] = frozenset()
    counters: ClassVar[bool] = False

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds or Thresholds()
        self.templates: weakref.WeakSet[HotTemplate] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.counts = CompilationCounters()

    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return the record of a template, which all sessions share."""
        if not isinstance(template, ServedFacts):
            return None
        hot = HotTemplate(
            template.template,
            self._thresholds,
            self.submit,
            template.digest.hex()[:8],
            self.counts,
            skipped=self.skipped,
            maybe_dynamic=self.maybe_dynamic,
            counters=self.counters,
        )
        with self._lock:
            self.templates.add(hot)
        return hot

    def phases(self) -> Sequence[Phase]:
        """Return the phase of each template."""
        with self._lock:
            return [hot.phase for hot in self.templates]

    @abstractmethod
    def submit(self, job: CompilationJob) -> None:
        """Have a region replaced: call `check` of its template with the result, or `try_next_compiler` or `give_up`."""
