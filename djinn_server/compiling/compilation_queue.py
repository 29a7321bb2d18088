"""The compilation queue of a device: a background thread compiles one template at a time, each region as a `torch.fx.GraphModule`."""

from __future__ import annotations

import itertools
import math
import operator
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import fx

from djinn_core.errors import StartupError
from djinn_core.ir.form import (
    Argument,
    ComplexSlot,
    Constant,
    Enumerated,
    Form,
    ListArg,
    Operand,
    ScalarTensor,
    SelfDevice,
    SlotArg,
)
from djinn_core.ir.operators import resolve
from djinn_core.ir.values import TensorMeta, tensor_meta
from djinn_core.logs import get_logger
from djinn_core.system.lru import LruCache
from djinn_server.compiling.compiled_region import CompiledRegion
from djinn_server.compiling.hot_template import (
    AdoptedPhase,
    CheckingPhase,
    CompilationCounters,
    CompilationJob,
    CompilingPhase,
    HotTemplate,
    Thresholds,
    TimingPhase,
)
from djinn_server.compiling.scalars import call_with_tensors
from djinn_server.compiling.sizes import LinearSize, SizeRelation
from djinn_server.compiling.written_views import WrittenView
from djinn_server.hookspecs.compilers import Compiler, CompilerContext, Replay
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.hookspecs.run_strategies import RunOffer, RunStrategy, TemplateFacts
from djinn_server.running.arbiter import ServedFacts
from djinn_server.running.template_compiler import CompiledTemplate, enumerated


def region_graph(job: CompilationJob, device: torch.device) -> fx.GraphModule:
    """Return a job's region as a graph over its inputs. Numbers that depend on an input size are computed from it."""
    return _RegionGraphBuilder(job, device).make()


class _RegionGraphBuilder:
    def __init__(self, job: CompilationJob, device: torch.device) -> None:
        self.template, self.region, self.law, self.device = job.template, job.region, job.law, device
        self.graph = fx.Graph()
        self.nodes: dict[int, Any] = {place: self.graph.placeholder(f"x{place}") for place in self.region.inputs}
        self.floats = self.graph.placeholder("floats") if self.law.floats else None
        self._look_into_written(job.aliases)
        places = zip(self.region.inputs, self.law.example.metas, strict=True)
        self._empty = [self.nodes[place] for number, (place, meta) in enumerate(places) if self._is_empty(number, meta)]
        self.moved = False  # True if the current call takes one of the floats
        self.slot = 0  # index of the next slot
        self.n: Any = None
        self.lines: dict[LinearSize, Any] = {}

    def _look_into_written(self, aliases: Iterable[WrittenView]) -> None:
        inputs, metas = self.region.inputs, self.law.example.metas
        for alias in aliases:
            base, meta = self.nodes[inputs[alias.base]], metas[alias.view]
            view = (base, list(meta.shape), list(meta.stride), alias.offset)
            self.nodes[inputs[alias.view]] = self.graph.call_function(torch.ops.aten.as_strided.default, view)

    def _is_empty(self, number: int, meta: TensorMeta) -> bool:
        return meta.shape == (0,) and number not in self.law.sizes

    def make(self) -> fx.GraphModule:
        source = self.template.source
        for index, code in enumerate(source.code[: self.region.stop]):
            form = source.forms[code]
            if index < self.region.start:
                self.slot += form.slot_count
            else:
                self._call(form, index)
        self.graph.output(tuple([self.nodes[place] for place in self.region.fresh]))
        return fx.GraphModule({}, self.graph)

    def _call(self, form: Form, index: int) -> None:
        step = self.template.steps[index]
        operands = iter([self.nodes[place] for place in step.reads])
        self.moved = False
        args = tuple([self._argument(a, operands) for a in form.args])
        kwargs = {name: self._argument(a, operands) for name, a in form.kwargs}
        if form.op == "aten::cat" and not kwargs:
            result = self._joined(*args)
        elif self.moved:
            result = call_with_tensors(form.op, args, kwargs, self.graph.call_function)
        else:
            result = self.graph.call_function(resolve(form.op), args, kwargs)
        for number, place in step.makes:
            self.nodes[place] = self._taken(result, number) if form.sequence else result

    def _joined(self, tensors: Sequence[Any], *dimension: Any) -> Any:
        """Return a concatenation without empty tensors, such as a KV cache before its first token.

        With empty tensors, inductor uses another layout.
        """
        some = [tensor for tensor in tensors if tensor not in self._empty]
        if len(some) == 1:
            clone = torch.ops.aten.clone.default
            return self.graph.call_function(clone, (*some,), {"memory_format": torch.contiguous_format})
        return self.graph.call_function(torch.ops.aten.cat.default, (some or tensors, *dimension))

    def _taken(self, result: Any, number: int) -> Any:
        if isinstance(result, list):
            return result[number]
        return self.graph.call_function(operator.getitem, (result, number))

    def _argument(self, argument: Argument, operands: Iterator[Any]) -> Any:
        if isinstance(argument, Operand):
            return next(operands)
        if isinstance(argument, SlotArg):
            return self._slot()
        if isinstance(argument, ListArg):
            return [self._argument(item, operands) for item in argument.items]
        if isinstance(argument, ComplexSlot):
            return complex(self._slot(), self._slot())
        if isinstance(argument, ScalarTensor):
            return self._scalar_tensor(argument)
        if isinstance(argument, Constant):
            return argument.value
        if isinstance(argument, Enumerated):
            return enumerated(argument)
        if isinstance(argument, SelfDevice):
            return torch.device("cpu") if argument.cpu else self.device
        return None  # a generator; no op of a region uses one

    def _scalar_tensor(self, argument: ScalarTensor) -> Any:
        dtype = enumerated(Enumerated("dtype", argument.dtype))
        value = complex(self._slot(), self._slot()) if dtype.is_complex else self._slot()
        make = torch.ops.aten.scalar_tensor.default
        return self.graph.call_function(make, (value,), {"dtype": dtype, "device": torch.device("cpu")})

    def _slot(self) -> Any:
        index, self.slot = self.slot, self.slot + 1
        if index in self.law.floats:
            self.moved = True
            place = self.law.floats.index(index)
            return self.graph.call_function(torch.ops.aten.select.int, (self.floats, 0, place))
        line = self.law.slots.get(index)
        return self.law.example.slots[index] if line is None else self._line(line)

    def _line(self, line: LinearSize) -> Any:
        """Return `line` as nodes, created once."""
        if line not in self.lines:
            value = self._base()
            if line.times != 1:
                value = self.graph.call_function(operator.mul, (value, line.times))
            if line.plus:
                value = self.graph.call_function(operator.add, (value, line.plus))
            self.lines[line] = value
        return self.lines[line]

    def _base(self) -> Any:
        if self.n is None:
            assert self.law.base is not None
            source, dimension = self.law.base
            tensor = self.nodes[self.region.inputs[source]]
            self.n = self.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dimension))
        return self.n


def _float_metas(law: SizeRelation) -> tuple[TensorMeta, ...]:
    """Return the extra input with the varying fractional numbers, if any."""
    return (tensor_meta((len(law.floats),), (1,), 0, torch.float64),) if law.floats else ()


TEMPLATES: Final = 1024  # that are counted
COMPILED_LIMIT: Final = 256  # that are kept
_log = get_logger("djinn.server")


def chosen(compilers: Sequence[Compiler], names: Sequence[str]) -> tuple[Compiler, ...]:
    """Return the compilers called `names`, in that order.

    Raises:
        StartupError: no compiler has one of the names; the message lists the compilers.
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


class CompilationQueue(RunStrategy):
    """Counts the runs of all templates on a device, and compiles the hot templates.

    Compiled code may round differently than the ops. The operator chose that by naming a compiler, so it runs for all
    sessions.

    Attributes:
        counts: counters since the executor began.
    """

    name = "compiled"

    def __init__(
        self, compilers: Sequence[Compiler], runtime: DeviceRuntime, thresholds: Thresholds | None = None
    ) -> None:
        self._compilers = tuple(compilers)
        self._runtime = runtime
        self._thresholds = thresholds or Thresholds()
        self._templates: LruCache[bytes, HotTemplate] = LruCache(TEMPLATES)
        self._lock = threading.Lock()
        # Jobs with the largest share of time come first; None: prepare the compilers.
        self._jobs: queue.PriorityQueue[tuple[float, int, CompilationJob | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._told: set[tuple[str, str]] = set()
        self.counts = CompilationCounters()

    def template(self, digest: bytes, template: CompiledTemplate) -> HotTemplate:
        """Return the record of a template on this device, shared by all sessions."""
        with self._lock:
            hot = self._templates.use(digest)
            if hot is None:
                name = digest.hex()[:8]
                hot = HotTemplate(template, self._thresholds, self._ask, name, self.counts)
                for evicted in self._templates.store(digest, hot):
                    evicted.leave("others are used more")
                if len(self._templates) == 1:
                    self.prepare()
        return hot

    def acts_on(self, template: TemplateFacts) -> RunOffer:
        """Return True if this strategy handles the template, as `RunStrategy.acts_on` does."""
        assert isinstance(template, ServedFacts)
        return self.template(template.digest, template.template)

    def figures(self) -> dict[str, int]:
        """Return the number of compiled templates, and of templates that wait for a compiler, a check or a timing."""
        with self._lock:
            phases = [hot.phase for hot in self._templates.values()]
        return {
            "compiled_templates": sum(isinstance(phase, AdoptedPhase) for phase in phases),
            "compiling_templates": sum(
                isinstance(phase, CompilingPhase | CheckingPhase | TimingPhase) for phase in phases
            ),
        }

    def _ask(self, job: CompilationJob) -> None:
        if job.compiler >= len(self._compilers):
            job.hot.leave("no compiler has something better")
        elif self.figures()["compiled_templates"] >= COMPILED_LIMIT:
            job.hot.leave(f"{COMPILED_LIMIT} templates are compiled already")
        else:
            self._jobs.put((-job.share, next(self._numbers), job))

    def prepare(self) -> None:
        """Prepare the compilers on the background thread. The first call starts the thread."""
        self._jobs.put((-math.inf, next(self._numbers), None))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="djinn-compiling", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()[-1]
            if job is None:
                self._prepare()
            else:
                self._compile(job)

    def _prepare(self) -> None:
        for compiler in self._compilers:
            try:
                compiler.prepare()
            except Exception as error:  # the compiler reports it again when it compiles
                _log.debug("a compiler is not prepared", compiler=compiler.name, error=repr(error))

    def _compile(self, job: CompilationJob) -> None:
        compiler = self._compilers[job.compiler]
        began = time.perf_counter()
        self.counts.compilations += 1
        try:
            replay = compiler.compile(self._context(job))
            compiled = replay and self._region(compiler.name, replay, job)
        except Exception as error:
            self.counts.failures += 1
            self._tell(compiler.name, job.hot.name, repr(error))
            job.hot.refuse(job, compiler.name, f"it raised {type(error).__name__}")
            return
        finally:
            self.counts.seconds += time.perf_counter() - began
        if compiled is None:
            job.hot.refuse(job, compiler.name, "it has nothing better")
        else:
            job.hot.check(job, compiled)

    def _region(self, compiler: str, replay: Replay, job: CompilationJob) -> CompiledRegion:
        return CompiledRegion(compiler, replay, job.template, job.region, job.law, self._runtime.receive, job.aliases)

    def _tell(self, compiler: str, template: str, error: str) -> None:
        """Warn once for each reason, not for every template."""
        log = _log.debug if (compiler, error) in self._told else _log.warning
        self._told.add((compiler, error))
        log(
            "a compiler failed: what it was asked for runs uncompiled",
            compiler=compiler,
            template=template,
            error=error,
        )

    def _context(self, job: CompilationJob) -> CompilerContext:
        device = self._runtime.device
        grows = {index: tuple(sizes) for index, sizes in job.law.sizes.items()}
        return CompilerContext(
            region_graph(job, device),
            (*job.law.example.metas, *_float_metas(job.law)),
            device,
            tuple([i for i, place in enumerate(job.region.inputs) if place in job.region.written]),
            grows,
            torch.get_num_threads(),
        )
