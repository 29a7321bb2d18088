"""Cached results of earlier runs: the ops that they replace, the key of a run, and its results.

The cacheable ops of a template are its longest sequence of ops whose results depend only on inputs, numbers and the
numeric settings.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, TypeGuard

import attrs
import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from djinn_core.ir.values import meta_of
from djinn_core.logs import get_logger
from djinn_core.system.lru import LruCache
from djinn_core.torch_private import inference_mode, storage_key
from djinn_core.wire.digests import ContentHash
from djinn_core.wire.messages import Claim, Template
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.templates import digest_of
from djinn_server.hookspecs.run_strategies import RunResults
from djinn_server.running.drawing import ALWAYS, draw_condition
from djinn_server.running.input_aliases import may_return_operand, written_places
from djinn_server.running.run import TemplateRun
from djinn_server.running.shared_prefixes import (
    MIN_SHARED,
    UNKNOWN,
    NoSharedPrefixError,
    PrefixInputs,
    PrefixRun,
    Whole,
    indices_of,
)
from djinn_server.running.storage_names import ReadAllowance, StorageNames
from djinn_server.running.template_checks import counts_of
from djinn_server.running.template_compiler import CompiledTemplate

MAX_ENTRIES: Final = 4096  # of each LRU cache
MAX_FAILURES: Final = 4  # consecutive runs that could not reuse leading rows; after them no run tries it
MAX_HELD_INPUT: Final = 1 << 20  # bytes of a consumed input that stays alive until the key is computed
_NUMBERS: Final = (bool, int, float, complex, type(None))
_log = get_logger("djinn.server")
_encode: Final = msgspec.msgpack.Encoder().encode


@attrs.frozen
class CacheableOps:
    """Ops of a template whose results can be cached. A place is an index in the environment, the list of a run's values.

    Attributes:
        start, stop: number of the first op, and of the op after the last one.
        digest: digest of the ops. Templates that contain the same ops have the same digest.
        inputs: places of the operands that these ops do not compute.
        released_inputs: positions in `inputs` of the values that the ops release.
        slots: range of the places of the ops' numbers.
        draw_slots: places of numbers that must be 0. Otherwise the ops draw random numbers.
        results: places of the results that outlive the run.
        written_later: places, other than `inputs`, whose values exist before these ops and may be written by later ops.
    """

    start: int
    stop: int
    digest: bytes
    inputs: tuple[int, ...]
    released_inputs: tuple[int, ...]
    slots: slice
    draw_slots: tuple[int, ...]
    results: tuple[int, ...]
    written_later: tuple[int, ...]


def cacheable_ops(template: CompiledTemplate) -> CacheableOps | None:
    """Return the cacheable ops of a template.

    Return None if there are no such ops, if one of their results is used by later ops but does not outlive the run, or if
    later ops may write into their inputs or results.
    """
    steps, source = template.steps, template.source
    if not steps:
        return None
    forms = [source.forms[code] for code in source.code]
    conditions = {
        code: draw_condition(source.forms[code])
        for code in {*source.code}
        if source.forms[code].op.startswith("aten::")
    }
    boundaries = [
        at for at, code in enumerate(source.code) if conditions.get(code, ALWAYS) == ALWAYS or steps[at].moves
    ]
    start, stop = max(((a + 1, b) for a, b in pairwise((-1, *boundaries, len(steps)))), key=lambda ops: ops[1] - ops[0])
    numbers, outside = dict[int, int](), set[int]()
    for at in range(start, stop):
        step = steps[at]
        results = [place for _, place in step.makes]
        outside.update(place for place in step.reads if place not in numbers)
        if not outside.isdisjoint(written_places(step)):
            stop = at
            break
        numbers.update((place, len(numbers)) for place in step.reads if place not in numbers)
        numbers.update((place, len(numbers)) for place in results if place not in numbers)
        if may_return_operand(step.op) and not outside.isdisjoint(step.reads):
            outside.update(results)
    cacheable_steps = steps[start:stop]
    computed_places = {place for step in cacheable_steps for _, place in step.makes}
    released = {place for step in cacheable_steps for place in step.release}
    surviving, written = computed_places - released, _written_from(template, start, stop)
    inputs = tuple(place for place in numbers if place not in computed_places)
    if not surviving or not surviving <= {*template.outputs} or not written.isdisjoint((*computed_places, *inputs)):
        return None
    arity = [counts_of(form) for form in forms]
    first = len(template.constants) + sum(call.slots for call in arity[:start])
    draws, slot = list[int](), first
    for at in range(start, stop):
        if (condition := conditions[source.code[at]]) is not None:
            draws.append(slot + condition)
        slot += arity[at].slots
    result_places = tuple(place for place in numbers if place in surviving)
    codes = {code: number for number, code in enumerate(dict.fromkeys(source.code[start:stop]))}
    digest = digest_of(
        Template(
            tuple(source.forms[code] for code in codes),
            tuple(codes[code] for code in source.code[start:stop]),
            tuple(
                numbers[place]
                for step in cacheable_steps
                for place in (*step.reads, *(place for _, place in step.makes))
            ),
            tuple(numbers[place] for place in inputs),
            tuple(numbers[place] for place in result_places),
        )
    )
    released_inputs = tuple(number for number, place in enumerate(inputs) if place in released)
    written = written.difference(place for step in steps[stop:] for _, place in step.makes)
    return CacheableOps(
        start, stop, digest, inputs, released_inputs, slice(first, slot), tuple(draws), result_places, tuple(written)
    )


def _written_from(template: CompiledTemplate, start: int, stop: int) -> set[int]:
    """Return the places whose memory may be written by op number `stop` or a later op.

    For a view that op number `start` or a later op made, return the place of the base instead.
    """
    roots, written = dict[int, frozenset[int]](), set[int]()
    for at, step in enumerate(template.steps[start:], start):
        own = not step.op.startswith("aten::")
        if at >= stop:
            places = step.reads if own else written_places(step)
            written.update(*[roots.get(place, (place,)) for place in places])
        if own or may_return_operand(step.op):
            bases = frozenset[int]().union(*[roots.get(place, (place,)) for place in step.reads])
            roots.update((place, bases) for _, place in step.makes)
    return written


@attrs.frozen
class InputView:
    """A result that is a view of an input.

    Attributes:
        number: position of the input in `CacheableOps.inputs`.
        dtype, offset, shape, stride: dtype and layout of the view. `offset` counts elements in the storage.
    """

    number: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of `tensor` with this dtype and layout. `tensor`: the same input in a later run."""
        view = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return view.set_(tensor.untyped_storage(), self.offset, self.shape, self.stride)


@attrs.define(eq=False)
class CachedResults(RunResults):
    """Cached results of the cacheable ops of a run.

    Attributes:
        nbytes: bytes of the results, and of tensors that are kept in `inputs`.
        values: results in the order of `CacheableOps.results`; None after they were dropped.
        inputs: inputs of the ops; None if later runs may not reuse leading rows.
    """

    nbytes: int
    values: Sequence[Any] | None
    inputs: PrefixInputs | None = None

    @property
    def held(self) -> bool:
        """True until the results are dropped."""
        return self.values is not None

    def drop(self) -> None:
        """Free the results."""
        self.values, self.inputs = None, None


class CachedResultsTable:
    """All cached results of a device. Thread-safe, except for its attributes.

    Attributes:
        confirmed_layouts: predicted layouts that runs have confirmed, by a digest of all facts that determine layouts.
        prefix_failures: number of consecutive runs that could not reuse leading rows of an earlier run, by
            `CacheableOps.digest`.
    """

    def __init__(self) -> None:
        self.prefix_failures: LruCache[bytes, int] = LruCache(MAX_ENTRIES)
        self.confirmed_layouts: LruCache[bytes, frozenset[Claim]] = LruCache(MAX_ENTRIES)
        self._results: weakref.WeakSet[CachedResults] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, results: CachedResults) -> None:
        """Add results, so that `nbytes` counts them and `drop` frees them."""
        with self._lock:
            self._results.add(results)

    def nbytes(self) -> int:
        """Return the bytes of all cached results, including memory that sessions also use."""
        with self._lock:
            return sum([results.nbytes for results in self._results if results.held])

    def drop(self) -> None:
        """Free all results, because the device has no memory left."""
        with self._lock:
            for results in self._results:
                results.drop()


class CacheableRun:
    """A run of a template with cacheable ops. It computes the run's cache key, and stores or reuses results.

    Attributes:
        ops: the cacheable ops.
        reused: True if results of an earlier run replaced the ops.
        shared_storages: keys of the results' storages that both the cache and the session use.
    """

    def __init__(
        self,
        ops: CacheableOps,
        run: TemplateRun,
        names: StorageNames,
        table: CachedResultsTable,
        settings: NumericSettings | None,
    ) -> None:
        self.ops, self.reused, self.shared_storages = ops, False, set[int]()
        self._run, self._names, self._table, self._settings = run, names, table, settings
        self._inputs: list[Any] = []
        self._released_keys: dict[int, tuple[bytes, bytes]] = {}
        # The weak references keep their keys unique: no new storage gets the key.
        self._large_storages: dict[int, StorageWeakRef] = {}
        self._aliases: list[int] = []  # by input: the first input with the same storage
        self._digest: bytes | None = None
        self._input_keys: Sequence[tuple[bytes, bytes] | None] = ()
        self._layouts = b""  # digest of the ops, the numbers and the layouts of the inputs
        self._claims = frozenset[Claim]()
        self._may_round = settings is not None and not settings.exact

    def begin(self) -> bool:
        """Save the inputs before the cacheable ops run.

        Return False if the results of this run cannot be cached. Examples: the run is cancelled, the executor must run each op,
        or the memory of an input will be overwritten.
        """
        ops, run = self.ops, self._run
        if run.step != ops.start or not run.is_unobserved or run.outcome.halt.value or run.outcome.failures:
            return False
        self._inputs = inputs = [run.env[place] for place in ops.inputs]
        keys = [storage_key(value) if _is_strided(value) else 0 for value in inputs]
        written = [storage_key(value) for place in ops.written_later if _is_strided(value := run.env[place])]
        if run.extends_growing or not {*keys}.isdisjoint(written):
            return False  # an input's memory changes before the end of the run, when the key may be computed
        first = dict[int, int]()
        self._aliases = [first.setdefault(key, number) for number, key in enumerate(keys)]
        for number in ops.released_inputs:
            value = inputs[number]
            if _is_strided(value) and value.untyped_storage().nbytes() > MAX_HELD_INPUT:
                if (name := self._names.find(value)) is not None:
                    self._released_keys[number] = name, _layout(value)
                self._large_storages[storage_key(value)] = StorageWeakRef(value.untyped_storage())
                inputs[number] = _Large
        self._claims = frozenset(
            [
                msgspec.structs.replace(claim, instruction=at - ops.start)
                for at, claims in run.claims.items()
                for claim in claims
                if ops.start <= at < ops.stop
            ]
        )
        return True

    def digest(self, nbytes: int) -> bytes | None:
        """Return the run's cache key, as `StrategyRun.digest` does. `nbytes`: bytes of operands that may be read."""
        draws_numbers = any(self._run.env[place] != 0 for place in self.ops.draw_slots)
        if self._digest is None and self._run.is_unobserved and not draws_numbers:  # otherwise inputs may be evicted
            allowance = ReadAllowance(nbytes)
            parts = [self._input_key(number, allowance) for number in range(len(self._inputs))]
            if None in parts:
                return None
            self._input_keys = parts
            names, layouts = zip(*parts, strict=True) if parts else ((), ())
            numbers = _encode(self._run.env[self.ops.slots]), _encode(self._settings), _encode(self._aliases)
            self._layouts = ContentHash(b"".join((self.ops.digest, *numbers, *layouts))).digest()
            self._digest = ContentHash(_encode((self._layouts, *names))).digest()
        return self._digest

    def _input_key(self, number: int, allowance: ReadAllowance) -> tuple[bytes, bytes] | None:
        """Return the name of an input's contents and its layout, as bytes. Return None if the contents have no name.

        `number`: position of the input. `allowance`: bytes of inputs that may still be read.
        """
        value = self._inputs[number]
        if number in self._released_keys:
            return self._released_keys[number]
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                return None
            return self._names.name(value, allowance), _layout(value)
        return (b"", f"{type(value).__name__} {value!r};".encode()) if isinstance(value, _NUMBERS) else None

    def results(self) -> CachedResults | None:
        """Return the results of the ops, as `StrategyRun.results` does."""
        run, ops = self._run, self.ops
        is_complete = run.step >= ops.stop and run.is_unobserved and run.outcome.stopped_at is None
        if not is_complete or self._digest is None or run.outcome.failures or run.outcome.layout_mismatches:
            return None
        inputs = {storage_key(value): number for number, value in enumerate(self._inputs) if _is_strided(value)}
        values, storages = list[Any](), dict[int, int]()
        with inference_mode(True):
            for place in ops.results:
                value = run.dense_value(place)
                if isinstance(value, _NUMBERS):
                    values.append(value)
                    continue
                if not _is_strided(value) or value.is_quantized or value.is_conj() or value.is_neg():
                    return None
                key = storage_key(value)
                if key in self._large_storages:
                    return None
                if key in inputs:
                    meta = meta_of(value)
                    values.append(InputView(inputs[key], meta.dtype, meta.offset, meta.shape, meta.stride))
                    continue
                if key not in storages:
                    self._names.set_name(value, self._digest + len(storages).to_bytes(8))
                storages[key] = value.untyped_storage().nbytes()
                values.append(value.detach())
        self.shared_storages.update(storages)
        if self._claims:
            fulfilled = self._table.confirmed_layouts.get(self._layouts) or frozenset[Claim]()
            self._table.confirmed_layouts.store(self._layouts, fulfilled | self._claims)
        prefix_inputs = None
        if self._may_round:
            prefix_inputs = PrefixInputs(self._settings, self._input_keys, run.env[ops.slots], indices_of(self._inputs))
        nbytes = sum(storages.values()) + (prefix_inputs.nbytes if prefix_inputs is not None else 0)
        cached = CachedResults(nbytes, values, prefix_inputs)
        self._table.add(cached)
        return cached

    def reuse(self, results: RunResults) -> bool:
        """Store results in place of the ops' results, as `StrategyRun.reuse` does."""
        run, ops = self._run, self.ops
        assert isinstance(results, CachedResults)
        values = results.values
        if values is None or run.step != ops.start or run.outcome.halt.value:
            return False
        if self._claims and not self._claims <= (self._table.confirmed_layouts.use(self._layouts) or frozenset()):
            return False
        with inference_mode(True):
            for place, value in zip(ops.results, values, strict=True):
                if isinstance(value, InputView):
                    run.env[place] = value.of(run.env[ops.inputs[value.number]])
                elif isinstance(value, torch.Tensor):
                    self.shared_storages.add(storage_key(value))
                    run.env[place] = value.detach()
                else:
                    run.env[place] = value
        run.outcome.may_round_differently |= self._may_round  # the earlier run may have rounded differently
        self._pass_ops()
        return True

    def reuse_prefix(
        self, candidates: Iterable[RunResults], pause: Callable[[], Iterator[None]]
    ) -> Generator[None, None, bool]:
        """Reuse leading rows of an earlier run, as `StrategyRun.reuse_prefix` does.

        `pause`: returns steps that yield the device to other sessions.
        """
        run, ops, work, prefix_failures = self._run, self.ops, self._run.work, self._table.prefix_failures
        if not self._may_round or self._digest is None or self._claims or run.step != ops.start:
            return False
        tries = prefix_failures.use(ops.digest) or 0
        prefix_run = self._prefix_run(candidates) if tries < MAX_FAILURES else None
        if prefix_run is None:
            return False
        try:
            for _ in prefix_run.run():
                if run.outcome.halt.value:
                    if work.on_halt is None or not work.on_halt(work):
                        return False
                    yield from pause()
            results_at_places = prefix_run.results_at(ops.results)
        except NoSharedPrefixError as error:
            prefix_failures.store(ops.digest, tries + 1)
            _log.debug("the leading rows of an earlier run are not reused", reason=str(error))
            return False
        for place, value in zip(ops.results, results_at_places, strict=True):
            run.env[place] = value
        prefix_failures.store(ops.digest, 0)
        run.outcome.may_round_differently = True
        self._pass_ops()
        return True

    def _prefix_run(self, candidates: Iterable[RunResults]) -> PrefixRun | None:
        """Return a run that reuses rows of the candidate with the longest common prefix of rows.

        Return None if no candidate shares the fraction `MIN_SHARED` of its rows.
        """
        run, ops, longest = self._run, self.ops, None
        for candidate in candidates:
            assert isinstance(candidate, CachedResults)
            inputs, values = candidate.inputs, candidate.values
            if inputs is None or values is None:
                continue
            extent = inputs.shared_rows(self._settings, self._input_keys, self._inputs)
            if extent is None or extent.first < MIN_SHARED * extent.count:
                continue
            if longest is None or extent.first > longest[0].first:
                longest = extent, inputs, dict(zip(ops.results, values, strict=True))
        if longest is None:
            return None
        extent, inputs, results = longest
        env, before = [*run.env], [*run.env]
        before[ops.slots] = inputs.numbers
        for number, place in enumerate(ops.inputs):
            same = self._input_keys[number] == inputs.names[number]
            value = run.env[place]
            env[place] = before[place] = Whole(value, value if same else inputs.indices.get(number, UNKNOWN))
        return PrefixRun(run.template.steps[ops.start : ops.stop], env, before, results, *attrs.astuple(extent))

    def _pass_ops(self) -> None:
        """Skip the cacheable ops, because their results are available."""
        released = {
            place for step in self._run.template.steps[self.ops.start : self.ops.stop] for place in step.release
        }
        self._run.skip_steps(self.ops.stop, [*released], {})
        self.reused = True

    def shared_outputs(self, handles: Iterable[int]) -> list[int]:
        """Return those of the template's output handles whose memory the cache also uses."""
        if not self.shared_storages:
            return []
        values = [self._run.env[place] for place in self._run.template.outputs]
        pairs = zip(handles, values, strict=True)
        return [handle for handle, value in pairs if _is_strided(value) and storage_key(value) in self.shared_storages]


class _Large:
    """Placeholder for a large input, so that the run can free the input's memory."""


def _is_strided(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _layout(tensor: torch.Tensor) -> bytes:
    flags = tensor.is_conj(), tensor.is_neg()
    offset = int(tensor.storage_offset())
    return f"{tensor.device.type} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {offset} {flags};".encode()
