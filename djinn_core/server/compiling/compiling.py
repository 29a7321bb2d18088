"""The compilation queue of a device: a background thread compiles one template at a time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

import torch

from djinn_core.errors import StartupError
from djinn_core.hookspecs.compilers import Compiler, CompilerContext
from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_core.logs import get_logger
from djinn_core.lru import LruCache
from djinn_core.server.compiling.artefact import Artefact
from djinn_core.server.compiling.graph import region_graph
from djinn_core.server.compiling.hot_template import (
    Adopted,
    Checking,
    CompilationCounters,
    HotTemplate,
    Job,
    Thresholds,
    TimingPhase,
    Waiting,
)
from djinn_core.server.running.template_compiler import CompiledTemplate

TEMPLATES: Final = 1024  # that are counted
ARTEFACTS: Final = 256  # that are kept
_log = get_logger("djinn.server")


def chosen(compilers: Sequence[Compiler], names: Sequence[str]) -> tuple[Compiler, ...]:
    """The compilers called `names`, in that order.

    Raises:
        StartupError: there is none of such a name; the message says which there are.
    """
    known = {compiler.name: compiler for compiler in compilers}
    for name in names:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise StartupError(
                f"there is no compiler {name!r} here (compilers: {there}). Compilers come with plugins, such as those in "
                "plugins/compilers of the checkout; `djinn plugins` shows what is installed"
            )
    return tuple(known[name] for name in names)


class Compiling:
    """Counts the runs of all templates on a device and has the hot ones compiled.

    Attributes:
        counts: counters since the executor began.
    """

    def __init__(
        self, compilers: Sequence[Compiler], runtime: DeviceRuntime, thresholds: Thresholds | None = None
    ) -> None:
        self._compilers = tuple(compilers)
        self._runtime = runtime
        self._thresholds = thresholds or Thresholds()
        self._templates: LruCache[bytes, HotTemplate] = LruCache(TEMPLATES)
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._told: set[tuple[str, str]] = set()
        self.counts = CompilationCounters()

    def template(self, digest: bytes, template: CompiledTemplate) -> HotTemplate:
        """The record of a template on this device, shared by all sessions."""
        with self._lock:
            hot = self._templates.use(digest)
            if hot is None:
                synchronize, name = self._runtime.synchronize, digest.hex()[:8]
                hot = HotTemplate(template, self._thresholds, self._ask, synchronize, name, self.counts)
                for evicted in self._templates.store(digest, hot):
                    evicted.leave("others are used more")
        return hot

    def figures(self) -> dict[str, int]:
        """Number of templates that run compiled, and of those that wait for a compiler or are being checked and timed."""
        with self._lock:
            phases = [hot.phase for hot in self._templates.values()]
        return {
            "compiled_templates": sum(isinstance(phase, Adopted) for phase in phases),
            "compiling_templates": sum(isinstance(phase, Waiting | Checking | TimingPhase) for phase in phases),
        }

    def _ask(self, job: Job) -> None:
        if job.compiler >= len(self._compilers):
            job.hot.leave("no compiler has something better")
        elif self.figures()["compiled_templates"] >= ARTEFACTS:
            job.hot.leave(f"{ARTEFACTS} templates are compiled already")
        else:
            self._jobs.put(job)
            self._work()

    def _work(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="djinn-compiling", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while True:
            self._compile(self._jobs.get())

    def _compile(self, job: Job) -> None:
        compiler = self._compilers[job.compiler]
        began = time.perf_counter()
        self.counts.compilations += 1
        try:
            replay = compiler.compile(self._context(job))
            artefact = replay and Artefact(compiler.name, replay, job.template, job.region, job.law)
        except Exception as error:
            self.counts.failures += 1
            self._tell(compiler.name, job.hot.name, repr(error))
            job.hot.refuse(job, compiler.name, f"it raised {type(error).__name__}")
            return
        finally:
            self.counts.seconds += time.perf_counter() - began
        if artefact is None:
            job.hot.refuse(job, compiler.name, "it has nothing better")
        else:
            job.hot.compiled(job, artefact)

    def _tell(self, compiler: str, template: str, error: str) -> None:
        """Warn once of each reason: what is missing is missing for every template."""
        log = _log.debug if (compiler, error) in self._told else _log.warning
        self._told.add((compiler, error))
        log(
            "a compiler failed: what it was asked for runs uncompiled",
            compiler=compiler,
            template=template,
            error=error,
        )

    def _context(self, job: Job) -> CompilerContext:
        device = self._runtime.device
        grows = {index: tuple(sizes) for index, sizes in job.law.sizes.items()}
        return CompilerContext(
            region_graph(job.template, job.region, job.law, device),
            job.law.example.metas,
            device,
            tuple([i for i, place in enumerate(job.region.inputs) if place in job.region.written]),
            grows,
            torch.get_num_threads(),
        )
