"""Base of the run strategies that replace hot templates. It keeps one `HotTemplate` for each template of a device."""

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
    """Count the runs of all templates on a device, and replace instructions of hot templates.

    Attributes:
        counts: counters since the executor started.
        skipped: ops that a region may contain but that run separately, as in `find_region`.
        maybe_dynamic: ops that a region may contain although result sizes may depend on data, as in `find_region`.
        counters: True if `n` may be a slot when no size varies, as in `infer_size_relation`.
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
        """Return the offer of a template. All sessions share it."""
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
        """Return the present phase of each template."""
        with self._lock:
            return [hot.phase for hot in self.templates]

    @abstractmethod
    def submit(self, job: CompilationJob) -> None:
        """Compile or record the region of a job.

        Implementations pass the result to `start_checking` of `job.hot`. Without a result, they call
        `try_next_compiler` or `give_up` of `job.hot`.
        """
