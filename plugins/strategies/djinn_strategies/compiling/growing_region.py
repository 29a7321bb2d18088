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
_SHARE: Final = 4  # a new buffer has at least a quarter of its entries as spare entries
_COPIES: Final = 64  # tolerated copies per growing input, before copies are compared with results


def capacity_for(n: int) -> int:
    """Return the capacity of a buffer for `n` entries: with spare entries, and a multiple of 32."""
    return -(-(n + max(_SPARE, n // _SHARE)) // 32) * 32


@attrs.define(eq=False)
class GrowingBuffer:
    """Device memory of a tensor that grows in dimension `dim`.

    Attributes:
        memory: the whole buffer.
        dim: the dimension that grows.
        plus: the input has `n + plus` entries in a run of size `n`.
        used_entries: number of valid entries.
        nonzero_entries: number of first entries that may be nonzero. All later entries are zero.
    """

    memory: torch.Tensor
    dim: int
    plus: int
    used_entries: int = 0
    nonzero_entries: int = 0
    _address: int = attrs.field(init=False)
    _baseline: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._address = self.memory.data_ptr()

    def set_baseline(self) -> None:
        """Regard all present references to the buffer as the recording's own. `is_held` counts only later ones."""
        self._baseline = self._use_count()

    def _use_count(self) -> int:
        return torch_private.storage_use_count(self.memory.untyped_storage())

    @property
    def was_evicted(self) -> bool:
        """True if the memory was evicted, so that its address changed."""
        return self.memory.data_ptr() != self._address

    def is_held(self, allowed_views: int = 0) -> bool:
        """Return True if more than `allowed_views` references were added to the buffer since `set_baseline`."""
        return self._use_count() > self._baseline + allowed_views

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is the view of the valid entries."""
        return (
            tensor.data_ptr() == self._address
            and tensor.size(self.dim) == self.used_entries
            and tensor.stride() == self.memory.stride()
            and not self.was_evicted
        )

    def load(self, tensor: torch.Tensor) -> None:
        """Copy a tensor into the buffer, and set all later entries to zero, because attention needs finite entries."""
        self.used_entries = tensor.size(self.dim)
        self.first_entries(self.used_entries).copy_(tensor)
        if self.nonzero_entries > self.used_entries:
            self.memory.narrow(self.dim, self.used_entries, self.nonzero_entries - self.used_entries).zero_()
        self.nonzero_entries = self.used_entries

    def set_used(self, used: int) -> None:
        """Set the number of valid entries to `used`, after a replay that appended entries."""
        self.used_entries, self.nonzero_entries = used, max(self.nonzero_entries, used)

    def first_entries(self, entries: int) -> torch.Tensor:
        """Return a view of the first `entries` entries."""
        return self.memory.narrow(self.dim, 0, entries)


def new_buffer(tensor: torch.Tensor, capacity: int, dim: int, plus: int) -> GrowingBuffer:
    """Return a zero buffer of `capacity` entries for a tensor that grows in `dim` and has `n + plus` entries."""
    shape = [capacity if position == dim else size for position, size in enumerate(tensor.shape)]
    return GrowingBuffer(torch.zeros(shape, dtype=tensor.dtype, device=tensor.device), dim, plus)


@attrs.define(eq=False, kw_only=True)
class GrowingRecording(Recording):
    """A graph of fixed capacity.

    Attributes:
        growing_buffers: buffers by index of the input.
        min_n: the smallest `n` for which the graph is valid.
        max_n: the largest `n` for which the graph is valid.
        buffer_results: for each result in a buffer, the buffer's input, and `plus`: the result has `n + plus` entries.
        padded_results: for each padded result in its own memory, the padded dimension, and `plus`.
        rewritten_inputs: inputs whose valid entries the graph overwrites, as in beam search.
    """

    growing_buffers: Mapping[int, GrowingBuffer]
    min_n: int
    max_n: int
    buffer_results: Mapping[int, tuple[int, int]]
    padded_results: Mapping[int, tuple[int, int]]
    rewritten_inputs: frozenset[int]

    def accepts(self, inputs: Sequence[torch.Tensor], n: int, released: Container[int]) -> bool:
        """Return True if the graph is valid for `n`, and each growing input is in its buffer or can be copied into it.

        `released`: indices of inputs that nothing reads after this run.
        """
        return self.min_n <= n <= self.max_n and all(
            self._accepts(index, buffer, inputs[index], index in released)
            for index, buffer in self.growing_buffers.items()
        )

    def _accepts(self, index: int, buffer: GrowingBuffer, tensor: torch.Tensor, is_released: bool) -> bool:
        if not buffer.holds(tensor):
            return not buffer.is_held()
        return index not in self.rewritten_inputs or (is_released and not buffer.is_held(allowed_views=1))

    def overwritten_addresses(self) -> set[int]:
        """Return the addresses of `Recording.overwritten_addresses`, and of the buffers of `rewritten_inputs`."""
        return super().overwritten_addresses() | {
            self.growing_buffers[index].memory.data_ptr() for index in self.rewritten_inputs
        }

    def is_dead(self) -> bool:
        """Return True if a buffer was evicted, or in the cases of `Recording.is_dead`."""
        return super().is_dead() or any(buffer.was_evicted for buffer in self.growing_buffers.values())

    def replay_at(
        self, n: int, inputs: Sequence[torch.Tensor], written_inputs: Sequence[int], copied_results: set[int]
    ) -> list[torch.Tensor]:
        """Launch the graph for a run of size `n`, and return the results, as in `replay`."""
        for index, buffer in self.growing_buffers.items():
            if not buffer.holds(inputs[index]):
                buffer.load(inputs[index])
        results = self.replay(inputs, written_inputs, copied_results)
        for at, (index, plus) in self.buffer_results.items():
            buffer = self.growing_buffers[index]
            buffer.set_used(n + plus)
            results.insert(at, buffer.first_entries(buffer.used_entries))
        for at, (dim, plus) in self.padded_results.items():
            results[at] = results[at].narrow(dim, 0, n + plus).clone(memory_format=torch.contiguous_format)
        return results


class GrowingRegion(RecordedRegion):
    """A region with recordings of several capacities.

    Attributes:
        result_views: number of results so far that were views of a buffer.
        copied: number of such results that were copied to dense tensors for readers outside the region.
    """

    recordings: list[GrowingRecording]  # type: ignore[assignment]
    may_round_differently = True

    def __init__(self, job: Any, recorder: Recorder) -> None:
        """Prepare to record the region of a `CompilationJob` whose sizes vary.

        Raises:
            UnpaddableError: the region cannot be padded to a capacity.
        """
        super().__init__(job, recorder)
        self._grows: dict[int, tuple[int, int]] = {}
        for index, sizes in self.relation.sizes.items():
            [(dim, line), *more_sizes] = sizes.items()
            if more_sizes or line.times != 1:
                raise UnpaddableError("an input grows in several dimensions, or several times as fast as another input")
            self._grows[index] = (dim, line.plus)
        self.growing_inputs = frozenset(self._grows)
        if not self.growing_inputs.isdisjoint(self._written_inputs):
            raise UnpaddableError("it writes into an input that grows")
        self.result_views = self.copied = 0
        self._n, self._varying = 0, list[float]()

    def check_guard(self, env: Environment) -> int | None:
        """Check a run as in `RecordedRegion.check_guard`, but accept growing inputs with spare memory."""
        tensors = self._inputs(env)
        n = self._guard.check(tensors, env[self._slots], self.growing_inputs)
        if n is None or not self.is_worthwhile:
            return None
        self._n, self._varying = n, [env[place] for place in self._floats]
        self._next_recording = self._find_recording(tensors)
        return None if self._next_recording is None else n

    @property
    def is_worthwhile(self) -> bool:
        """False if readers outside the region read many results, because each such result is copied twice."""
        return self.copied <= _COPIES * len(self.growing_inputs) + self.result_views // 4

    def run(self, env: Environment) -> None:
        """Replay the graph on `env`, as `CompiledRegion.run` does."""
        self._write_numbers()
        recording = self._next_recording
        assert isinstance(recording, GrowingRecording)
        for place, tensor in zip(self.region.owned_results, self._replay(self._inputs(env)), strict=True):
            env[place] = tensor
        for view in self._views:
            view(env)
        self.growing_results = frozenset([self.region.owned_results[at] for at in recording.buffer_results])
        self.result_views += len(self.growing_results)

    def _write_numbers(self) -> None:
        self._overwrite_numbers(torch.tensor([*self._varying, self._n], dtype=torch.float64).view(torch.uint8))

    def _fits(self, recording: Recording, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> bool:
        assert isinstance(recording, GrowingRecording)
        return super()._fits(recording, tensors, addresses) and recording.accepts(
            tensors, self._n, self._released_inputs(tensors)
        )

    def _launch(self, recording: Recording, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert isinstance(recording, GrowingRecording)
        return recording.replay_at(self._n, inputs, self._written_inputs, self._copied_results)

    def _record(self, tensors: Sequence[torch.Tensor], weights: frozenset[int]) -> Recording | None:
        if not weights.issuperset([i for alias in self._aliases for i in (alias.view, alias.base)]):
            return None
        capacity = capacity_for(self._n + max([plus for _, plus in self._grows.values()], default=0))
        growing_buffers = {i: new_buffer(tensors[i], capacity, *grows) for i, grows in self._grows.items()}
        buffers = {
            i: memory_span(tensors[i]).clone() for i in range(len(tensors)) if i not in weights | self.growing_inputs
        }
        example_inputs: list[Any] = [*tensors]
        for i, buffer in buffers.items():
            example_inputs[i] = buffer.as_strided(tensors[i].shape, tensors[i].stride(), 0)
        for i, grows in growing_buffers.items():
            example_inputs[i] = Padded(grows.memory, grows.dim, grows.plus, finite=True, buffer=i, origin=i)
        if self._numbers is None:
            self._numbers = self._runtime.receive(torch.zeros(8 * (len(self._floats) + 1), dtype=torch.uint8))
        self._write_numbers()
        runs: list[PaddedRun] = []
        rewritten_inputs = set[int]()

        def results() -> Sequence[torch.Tensor]:
            runs.append(run := self._run_padded(example_inputs, capacity))
            rewritten_inputs.update(_copy_back(run, self.region.owned_results, growing_buffers))
            return [_tensor_of(value) for value in self._results(run) if not _is_buffer(value)]

        launch, own_results, nbytes = self._recorder.record(results)
        self._check_memory(
            own_results,
            [*buffers.values(), *[value.memory for value in growing_buffers.values()], *[tensors[i] for i in weights]],
        )
        nbytes += sum(
            [value.nbytes for value in (*buffers.values(), *[value.memory for value in growing_buffers.values()])]
        )
        padded_values = self._results(run := runs.pop())
        layouts = [(tensor.untyped_storage(), meta_of(tensor)) for tensor in own_results]
        buffer_results = {at: (value.buffer, value.plus) for at, value in enumerate(padded_values) if _is_buffer(value)}
        padded_results = {
            at: (value.dim, value.plus)
            for at, value in enumerate(padded_values)
            if isinstance(value, Padded) and at not in buffer_results
        }
        del own_results, padded_values
        example_inputs.clear()
        run.env.clear()  # else the recording would find its results held
        in_place = [(i, tensors[i].data_ptr(), StorageWeakRef(tensors[i].untyped_storage())) for i in sorted(weights)]
        recording = GrowingRecording(
            launch, layouts, in_place, buffers, self._recorder.settings.current, nbytes,
            growing_buffers=growing_buffers, min_n=run.min_n, max_n=run.max_n, buffer_results=buffer_results, padded_results=padded_results, rewritten_inputs=frozenset(rewritten_inputs),
        )  # fmt: skip
        for value in growing_buffers.values():
            value.set_baseline()
        return recording if recording.accepts(tensors, self._n, self._released_inputs(tensors)) else None

    @staticmethod
    def _check_memory(results: Sequence[torch.Tensor], other_tensors: Sequence[torch.Tensor]) -> None:
        addresses = Counter(address_of(tensor) for tensor in (*results, *other_tensors) if tensor.nbytes)
        if any(addresses[address_of(tensor)] > 1 for tensor in results):
            raise UnpaddableError("a result shares memory with another result or with an input")

    def _results(self, run: PaddedRun) -> list[Any]:
        return [run.env[place] for place in self.region.owned_results]

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
            frozenset(self.region.owned_results),
        )
        for step, takes_float in self._steps:
            if not run.step(step):
                self._run_step(step, takes_float, env)
            run.store_written_copies(step)
            for place in step.release:
                if place not in fresh:
                    env[place] = None
        views = [self._template.steps[index] for index in self.region.views]
        if any(isinstance(env[place], Padded) for step in views for place in step.reads):
            raise UnpaddableError("the program keeps a view of a tensor that grows")
        return run


def _copy_back(run: PaddedRun, results: Sequence[int], buffers: Mapping[int, GrowingBuffer]) -> set[int]:
    """Copy results back into the buffers that their entries come from. Skip a buffer that holds a result already.

    Return the inputs whose buffers were overwritten.
    """
    filled_buffers = {value.buffer for place in results if _is_buffer(value := run.env[place])}
    rewritten_inputs = set[int]()
    for place in results:
        value = run.env[place]
        if not isinstance(value, Padded) or value.origin is None or value.origin in filled_buffers:
            continue
        memory = buffers[value.origin].memory
        memory.copy_(value.tensor if value.finite else run.fill_padding(value, 0))
        run.env[place] = attrs.evolve(value, tensor=memory, buffer=value.origin)
        filled_buffers.add(value.origin)
        rewritten_inputs.add(value.origin)
    return rewritten_inputs


def _is_buffer(value: Any) -> bool:
    return isinstance(value, Padded) and value.buffer is not None


def _tensor_of(value: Any) -> torch.Tensor:
    return value.tensor if isinstance(value, Padded) else value
