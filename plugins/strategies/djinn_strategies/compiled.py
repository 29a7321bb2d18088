"""The run strategy `compiled`: compile hot templates in the background with the compilers of plugins."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from djinn_core.hookspecs import hookimpl
from djinn_core.ir.values import TensorMeta, tensor_meta
from djinn_core.logs import get_logger
from djinn_server.hookspecs.compilers import Compiler, CompilerContext, Replay
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.hookspecs.run_strategies import RunOffer, RunStrategy, StrategyContext, TemplateFacts
from djinn_strategies.compiling.compiled_region import CompiledRegion
from djinn_strategies.compiling.hot_template import (
    AdoptedPhase,
    CheckingPhase,
    CompilationJob,
    CompilingPhase,
    Thresholds,
    TimingPhase,
)
from djinn_strategies.compiling.hot_templates import HotTemplates
from djinn_strategies.compiling.region_graph import region_graph
from djinn_strategies.compiling.sizes import SizeRelation

djinn_api_version = "2.0"
COMPILED_LIMIT: Final = 256  # maximum number of templates with adopted code
_log = get_logger("djinn.server")


class CompiledTemplates(HotTemplates):
    """Compile the hot templates of a device, and run the compiled code if it is faster.

    Compiled code may round differently than the ops. An operator who names a compiler accepts that, for all sessions.
    """

    name = "compiled"
    _compilers: tuple[Compiler, ...]
    _runtime: DeviceRuntime

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        super().__init__(thresholds or Thresholds())
        # Jobs with the largest share of time come first; None: prepare the compilers.
        self._jobs: queue.PriorityQueue[tuple[float, int, CompilationJob | None]] = queue.PriorityQueue()
        self._job_numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._reported_errors: set[tuple[str, str]] = set()

    def begin(self, context: StrategyContext) -> bool:
        """Prepare the compilers, as in `RunStrategy.begin`. Return False if the operator named no compiler."""
        self._compilers, self._runtime = context.compilers, context.device.runtime
        if self._compilers:
            self.prepare()
        return bool(self._compilers)

    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return the offer of a template, as `HotTemplates.acts_on` does.

        The first template prepares the compilers again, because their processes may have ended while they were idle.
        """
        if not self.templates:
            self.prepare()
        return super().acts_on(template)

    def figures(self) -> Mapping[str, float]:
        """Return the counters of compilations, and the numbers of templates that are compiled or being compiled."""
        phases, counts = self.phases(), self.counts
        return {
            "compilations": counts.compilations,
            "compilation_failures": counts.failures,
            "compilation_seconds": counts.seconds,
            "compilations_unused": counts.unused,
            "compiled_runs": counts.runs,
            "compiled_templates": sum(isinstance(phase, AdoptedPhase) for phase in phases),
            "compiling_templates": sum(
                isinstance(phase, CompilingPhase | CheckingPhase | TimingPhase) for phase in phases
            ),
        }

    def submit(self, job: CompilationJob) -> None:
        """Queue a job for the background thread, as `HotTemplates.submit` does."""
        if job.compiler >= len(self._compilers):
            job.hot.give_up("no compiler produced faster code with equal results")
        elif self.figures()["compiled_templates"] >= COMPILED_LIMIT:
            job.hot.give_up(f"the limit of {COMPILED_LIMIT} compiled templates is reached")
        else:
            self._jobs.put((-job.share, next(self._job_numbers), job))

    def prepare(self) -> None:
        """Prepare the compilers on the background thread. The first call starts this thread."""
        self._jobs.put((-math.inf, next(self._job_numbers), None))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_jobs, name="djinn-compiling", daemon=True)
            self._thread.start()

    def _run_jobs(self) -> None:
        while True:
            job = self._jobs.get()[-1]
            if job is None:
                self._prepare_compilers()
            else:
                self._compile(job)

    def _prepare_compilers(self) -> None:
        for compiler in self._compilers:
            try:
                compiler.prepare()
            except Exception as error:  # if it persists, `compile` raises it as well
                _log.debug("a compiler cannot be prepared", compiler=compiler.name, error=repr(error))

    def _compile(self, job: CompilationJob) -> None:
        compiler = self._compilers[job.compiler]
        start = time.perf_counter()
        self.counts.compilations += 1
        try:
            replay = compiler.compile(self._compiler_context(job))
            compiled_region = replay and self._compiled_region(compiler.name, replay, job)
        except Exception as error:
            self.counts.failures += 1
            self._warn_once(compiler.name, job.hot.name, repr(error))
            job.hot.try_next_compiler(job, compiler.name, f"it raised {type(error).__name__}")
            return
        finally:
            self.counts.seconds += time.perf_counter() - start
        if compiled_region is None:
            job.hot.try_next_compiler(job, compiler.name, "the compiler returned no code")
        else:
            job.hot.start_checking(job, compiled_region)

    def _compiled_region(self, compiler: str, replay: Replay, job: CompilationJob) -> CompiledRegion:
        return CompiledRegion(
            compiler, replay, job.template, job.region, job.relation, self._runtime.receive, job.aliases
        )

    def _warn_once(self, compiler: str, template: str, error: str) -> None:
        """Log a warning once for each error of a compiler, although many templates may cause the error."""
        log = _log.debug if (compiler, error) in self._reported_errors else _log.warning
        self._reported_errors.add((compiler, error))
        log("a compiler failed: the template runs uncompiled", compiler=compiler, template=template, error=error)

    def _compiler_context(self, job: CompilationJob) -> CompilerContext:
        device = self._runtime.device
        grows = {index: tuple(sizes) for index, sizes in job.relation.sizes.items()}
        return CompilerContext(
            region_graph(job, device),
            (*job.relation.example.metas, *_float_metas(job.relation)),
            device,
            tuple([i for i, place in enumerate(job.region.inputs) if place in job.region.written_inputs]),
            grows,
            torch.get_num_threads(),
        )


def _float_metas(relation: SizeRelation) -> tuple[TensorMeta, ...]:
    """Return the metadata of the additional input with the varying floats, or () if no float varies."""
    return (tensor_meta((len(relation.float_slots),), (1,), 0, torch.float64),) if relation.float_slots else ()


@hookimpl
def djinn_register_run_strategies() -> Iterable[RunStrategy]:
    """Register the run strategy `compiled`."""
    return [CompiledTemplates()]
