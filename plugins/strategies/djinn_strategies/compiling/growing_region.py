"""Record a region whose sizes grow at each run, such as a decode step with a KV cache, as a graph of fixed capacity.

The graph owns a buffer for each growing input. It appends new entries in place, at a position that it reads from device
memory. A result that a session gets is a view of the valid entries of the buffer. The next run takes this view as its
input, so nothing is copied. Any other input is first copied into the buffer. If a session still holds a view of the
buffer, another graph is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from djinn_core import torch_private
from djinn_core.ir.values import meta_of
from djinn_server.running.compiled_step import Environment
from djinn_strategies.compiling.padded_steps import Padded, PaddedRun, SymbolicNumber, UnpaddableError
from djinn_strategies.compiling.recorded_region import RecordedRegion, Recorder, Recording, memory_span
from djinn_strategies.compiling.written_views import address_of

_SPARE: Final = 64  # minimum number of spare entries in a new buffer
_SHARE: Final = 4  # spare entries as a share of the present entries: a quarter
_COPIES: Final = 64  # copies per result before their number counts


def capacity_for(n: int) -> int:
    """Return the capacity of a buffer for `n` entries, with room for more entries."""
    return -(-(n + max(_SPARE, n // _SHARE)) // 32) * 32


@attrs.define(eq=False)
class GrowingBuffer:
    """Device memory of a tensor that grows in dimension `dim`.

    Attributes:
        memory: the whole buffer.
        dim: the dimension that grows.
        plus: the input has `n + plus` entries.
        used: number of valid entries.
        written: number of entries that may be nonzero. The entries after them are zero.
    """

    memory: torch.Tensor
    dim: int
    plus: int
    used: int = 0
    written: int = 0
    _address: int = attrs.field(init=False)
    _baseline: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._address = self.memory.data_ptr()

    def set_baseline(self) -> None:
        """Count the present references to the buffer as references of the recording, not of a session."""
        self._baseline = self._uses()

    def _uses(self) -> int:
        return torch_private.storage_use_count(self.memory.untyped_storage())

    @property
    def moved(self) -> bool:
        """True if the memory was evicted, so that its address changed."""
        return self.memory.data_ptr() != self._address

    def is_held(self, besides: int = 0) -> bool:
        """Return True if sessions hold more than `besides` views of the buffer."""
        return self._uses() > self._baseline + besides

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is the view of the valid entries."""
        return (
            tensor.data_ptr() == self._address
            and tensor.size(self.dim) == self.used
            and tensor.stride() == self.memory.stride()
            and not self.moved
        )

    def load(self, tensor: torch.Tensor) -> None:
        """Copy a tensor into the buffer, and set all later entries to zero. Attention multiplies them by zero."""
        self.used = tensor.size(self.dim)
        self.part(self.used).copy_(tensor)
        if self.written > self.used:
            self.memory.narrow(self.dim, self.used, self.written - self.used).zero_()
        self.written = self.used

    def append(self, used: int) -> None:
        """Set the number of valid entries to `used`, after the graph has appended entries."""
        self.used, self.written = used, max(self.written, used)

    def part(self, entries: int) -> torch.Tensor:
        """Return a view of the first `entries` entries."""
        return self.memory.narrow(self.dim, 0, entries)


def new_buffer(tensor: torch.Tensor, capacity: int, dim: int, plus: int) -> GrowingBuffer:
    """Return a zero buffer of `capacity` entries for a tensor that grows in `dim`."""
    shape = [capacity if at == dim else size for at, size in enumerate(tensor.shape)]
    return GrowingBuffer(torch.zeros(shape, dtype=tensor.dtype, device=tensor.device), dim, plus)


@attrs.define(eq=False, kw_only=True)
class GrowingRecording(Recording):
    """A graph of fixed capacity.

    Attributes:
        grown: buffers by index of the input.
        least: the smallest `n` for which the graph is valid.
        most: the largest `n` for which the graph is valid.
        appended: for each result that is a buffer, its input and its `plus`: the result has `n + plus` entries.
        trimmed: for each padded result in its own memory, its dimension and its `plus`.
        rewritten: inputs whose valid entries the graph overwrites, as beam search does.
    """

    grown: Mapping[int, GrowingBuffer]
    least: int
    most: int
    appended: Mapping[int, tuple[int, int]]
    trimmed: Mapping[int, tuple[int, int]]
    rewritten: frozenset[int]

    def accepts(self, inputs: Sequence[torch.Tensor], n: int, used_up: Container[int]) -> bool:
        """Return True if the graph is valid for `n`, and each growing input is in its buffer or can be copied into it.

        `used_up`: inputs that nothing reads after this run.
        """
        return self.least <= n <= self.most and all(
            self._accepts(index, buffer, inputs[index], index in used_up) for index, buffer in self.grown.items()
        )

    def _accepts(self, index: int, buffer: GrowingBuffer, tensor: torch.Tensor, used_up: bool) -> bool:
        if not buffer.has(tensor):
            return not buffer.is_held()
        return index not in self.rewritten or (used_up and not buffer.is_held(besides=1))

    def overwritten(self) -> set[int]:
        """Return the addresses of `Recording.overwritten`, and of buffers whose valid entries the graph overwrites."""
        return super().overwritten() | {self.grown[index].memory.data_ptr() for index in self.rewritten}

    def is_dead(self) -> bool:
        """Return True as `Recording.is_dead` does, and also if a buffer was evicted."""
        return super().is_dead() or any(buffer.moved for buffer in self.grown.values())

    def replay_at(
        self, n: int, inputs: Sequence[torch.Tensor], written: Sequence[int], copied: set[int]
    ) -> list[torch.Tensor]:
        """Launch the graph for a run of size `n`, and return the results, as `replay` does."""
        for index, buffer in self.grown.items():
            if not buffer.has(inputs[index]):
                buffer.load(inputs[index])
        results = self.replay(inputs, written, copied)
        for at, (index, plus) in self.appended.items():
            buffer = self.grown[index]
            buffer.append(n + plus)
            results.insert(at, buffer.part(buffer.used))
        for at, (dim, plus) in self.trimmed.items():
            results[at] = results[at].narrow(dim, 0, n + plus).clone(memory_format=torch.contiguous_format)
        return results


class GrowingRegion(RecordedRegion):
    """A region with recordings of several capacities.

    Attributes:
        made: number of results so far that are views of a buffer.
        copied: number of these results that were copied to dense tensors for other readers.
    """

    recordings: list[GrowingRecording]  # type: ignore[assignment]
    rounds = True

    def __init__(self, job: Any, recorder: Recorder) -> None:
        """Prepare to record the region of a `CompilationJob`. The job's size relation must have a base.

        Raises:
            UnpaddableError: the region cannot be padded to a capacity.
        """
        super().__init__(job, recorder)
        self._grows: dict[int, tuple[int, int]] = {}
        for index, sizes in self.relation.sizes.items():
            [(dim, line), *others] = sizes.items()
            if others or line.times != 1:
                raise UnpaddableError("an input grows in several dimensions, or several times as fast as another input")
            self._grows[index] = (dim, line.plus)
        self.growing = frozenset(self._grows)
        if not self.growing.isdisjoint(self._written):
            raise UnpaddableError("it writes into an input that grows")
        self.made = self.copied = 0
        self._n, self._varying = 0, list[float]()

    def check_guard(self, env: Environment) -> int | None:
        """Check a run as `RecordedRegion.check_guard` does. Growing inputs may have spare memory."""
        tensors = self._inputs(env)
        n = self._guard.check(tensors, env[self._slots], self.growing)
        if n is None or not self.is_worthwhile:
            return None
        self._n, self._varying = n, [env[place] for place in self._floats]
        self._next = self._recording(tensors)
        return None if self._next is None else n

    @property
    def is_worthwhile(self) -> bool:
        """False if other readers than the next run read many results, because each such result is copied twice."""
        return self.copied <= _COPIES * len(self.growing) + self.made // 4

    def run(self, env: Environment) -> None:
        """Replay the graph on `env`, as `CompiledRegion.run` does."""
        self._write_numbers()
        recording = self._next
        assert isinstance(recording, GrowingRecording)
        for place, tensor in zip(self.region.fresh, self._replay(self._inputs(env)), strict=True):
            env[place] = tensor
        for view in self._views:
            view(env)
        self.grown = frozenset([self.region.fresh[at] for at in recording.appended])
        self.made += len(self.grown)

    def _write_numbers(self) -> None:
        self._overwrite_numbers(torch.tensor([*self._varying, self._n], dtype=torch.float64).view(torch.uint8))

    def _fits(self, recording: Recording, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> bool:
        assert isinstance(recording, GrowingRecording)
        return super()._fits(recording, tensors, addresses) and recording.accepts(
            tensors, self._n, self._used_up(tensors)
        )

    def _launch(self, recording: Recording, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert isinstance(recording, GrowingRecording)
        return recording.replay_at(self._n, inputs, self._written, self._copied)

    def _record(self, tensors: Sequence[torch.Tensor], weights: frozenset[int]) -> Recording | None:
        if not weights.issuperset([i for alias in self._aliases for i in (alias.view, alias.base)]):
            return None
        capacity = capacity_for(self._n + max([plus for _, plus in self._grows.values()], default=0))
        grown = {i: new_buffer(tensors[i], capacity, *grows) for i, grows in self._grows.items()}
        buffers = {i: memory_span(tensors[i]).clone() for i in range(len(tensors)) if i not in weights | self.growing}
        given: list[Any] = [*tensors]
        for i, buffer in buffers.items():
            given[i] = buffer.as_strided(tensors[i].shape, tensors[i].stride(), 0)
        for i, grows in grown.items():
            given[i] = Padded(grows.memory, grows.dim, grows.plus, finite=True, buffer=i, origin=i)
        if self._numbers is None:
            self._numbers = self._runtime.receive(torch.zeros(8 * (len(self._floats) + 1), dtype=torch.uint8))
        self._write_numbers()
        runs: list[PaddedRun] = []
        rewritten = set[int]()

        def results() -> Sequence[torch.Tensor]:
            runs.append(run := self._run_padded(given, capacity))
            rewritten.update(_copy_back(run, self.region.fresh, grown))
            return [_tensor_of(one) for one in self._results(run) if not _is_buffer(one)]

        launch, made, nbytes = self._recorder.record(results)
        self._check_memory(
            made, [*buffers.values(), *[one.memory for one in grown.values()], *[tensors[i] for i in weights]]
        )
        nbytes += sum([one.nbytes for one in (*buffers.values(), *[one.memory for one in grown.values()])])
        found = self._results(run := runs.pop())
        layouts = [(tensor.untyped_storage(), meta_of(tensor)) for tensor in made]
        appended = {at: (one.buffer, one.plus) for at, one in enumerate(found) if _is_buffer(one)}
        trimmed = {
            at: (one.dim, one.plus) for at, one in enumerate(found) if isinstance(one, Padded) and at not in appended
        }
        del made, found
        given.clear()
        run.env.clear()  # else the recording would find its results held
        in_place = [(i, tensors[i].data_ptr(), StorageWeakRef(tensors[i].untyped_storage())) for i in sorted(weights)]
        recording = GrowingRecording(
            launch, layouts, in_place, buffers, self._recorder.settings.now, nbytes,
            grown=grown, least=run.least, most=run.most, appended=appended, trimmed=trimmed, rewritten=frozenset(rewritten),
        )  # fmt: skip
        for one in grown.values():
            one.set_baseline()
        return recording if recording.accepts(tensors, self._n, self._used_up(tensors)) else None

    @staticmethod
    def _check_memory(made: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        addresses = Counter(address_of(tensor) for tensor in (*made, *others) if tensor.nbytes)
        if any(addresses[address_of(tensor)] > 1 for tensor in made):
            raise UnpaddableError("a result shares memory with another result or with an input")

    def _results(self, run: PaddedRun) -> list[Any]:
        return [run.env[place] for place in self.region.fresh]

    def _run_padded(self, inputs: Sequence[Any], capacity: int) -> PaddedRun:
        """Run the steps on inputs that are padded to `capacity`."""
        env = self._environment(inputs)
        assert self._numbers is not None
        *floats, n = self._numbers.view(torch.float64).unbind()
        for place, number in zip(self._floats, floats, strict=True):
            env[place] = number
        for slot, line in self.relation.slots.items():
            env[self._slots.start + slot] = SymbolicNumber(line)
        run, fresh = (
            PaddedRun(env, capacity, n.to(torch.int64), self._n, writes=any(step.writes for step in self.steps)),
            frozenset(self.region.fresh),
        )
        for step, takes_float in self._steps:
            if not run.step(step):
                self._run_step(step, takes_float, env)
            run.wrote(step)
            for place in step.release:
                if place not in fresh:
                    env[place] = None
        views = [self._template.steps[index] for index in self.region.views]
        if any(isinstance(env[place], Padded) for step in views for place in step.reads):
            raise UnpaddableError("the program keeps a view of a tensor that grows")
        return run


def _copy_back(run: PaddedRun, results: Sequence[int], buffers: Mapping[int, GrowingBuffer]) -> set[int]:
    """Copy a result back into the buffer that its entries come from, unless the buffer is itself a result.

    Return the inputs of the buffers that were overwritten.
    """
    taken = {one.buffer for place in results if _is_buffer(one := run.env[place])}
    rewritten = set[int]()
    for place in results:
        one = run.env[place]
        if not isinstance(one, Padded) or one.origin is None or one.origin in taken:
            continue
        memory = buffers[one.origin].memory
        memory.copy_(one.tensor if one.finite else run.filled(one, 0))
        run.env[place] = attrs.evolve(one, tensor=memory, buffer=one.origin)
        taken.add(one.origin)
        rewritten.add(one.origin)
    return rewritten


def _is_buffer(one: Any) -> bool:
    return isinstance(one, Padded) and one.buffer is not None


def _tensor_of(one: Any) -> torch.Tensor:
    return one.tensor if isinstance(one, Padded) else one
