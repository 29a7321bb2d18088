"""Record the kernel launches of a region once as a device graph, such as a CUDA graph, and replay them with one launch.

A graph has fixed addresses. It reads weights in place, and their addresses are checked before each replay. Other inputs
are copied into buffers. Varying floats are elements of one device tensor. A session gets each result in the graph's own
memory. If a session still holds a result at the next replay, later replays return copies of this result.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from djinn_core import torch_private
from djinn_core.ir.operators import GET_RANDOM_STATE
from djinn_core.ir.values import TensorMeta, meta_of
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.running.compiled_step import CompiledStep, Environment, ListSource
from djinn_server.running.process_settings import ProcessNumericSettings
from djinn_server.running.result_layout import layout_difference
from djinn_server.running.storage_names import StorageNames
from djinn_strategies.compiling.compiled_region import CompiledRegion
from djinn_strategies.compiling.scalars import call_with_tensors
from djinn_strategies.compiling.written_views import address_of

RECORDINGS: Final = 8  # maximum number of recordings of one region, each for different weights
SKIPPED_OPS: Final = frozenset({GET_RANDOM_STATE})  # has no kernel, and recorded regions draw no random numbers
_RUNS_PER_RECORDING: Final = 16  # limits later recordings, because recording takes longer than running the ops
_RECENT_RUNS: Final = (
    8  # runs by whose inputs weights are recognised, and without weights after which these are ordinary inputs
)


class Recorder(Protocol):
    """Records kernel launches on a device.

    Attributes:
        runtime: the device.
        settings: numeric settings of the process.
        names: names of the device's storages by content.
    """

    runtime: DeviceRuntime
    settings: ProcessNumericSettings
    names: StorageNames

    def record(
        self, run: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor], int]:
        """Record the kernel launches of `run`.

        Return a function that replays them, the tensors that receive the results, and the bytes of the graph.
        """


@attrs.define(eq=False)
class Recording:
    """A recorded graph with its buffers.

    Attributes:
        launch: launches the graph.
        results: storage and layout of each result.
        in_place: index, address and storage of each input that the graph reads in place.
        buffers: memory for each input that is copied before a replay, by index.
        settings: numeric settings under which the kernels were chosen.
        nbytes: device memory of the graph and its buffers.
        has_launched: True if the present replay has overwritten the results of the previous replay.
    """

    launch: Callable[[], None]
    results: Sequence[tuple[torch.UntypedStorage, TensorMeta]]
    in_place: Sequence[tuple[int, int, StorageWeakRef]]
    buffers: Mapping[int, torch.Tensor]
    settings: NumericSettings | None
    nbytes: int
    has_launched: bool = attrs.field(init=False, default=False)
    _baseline: Sequence[tuple[int, int]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._baseline = self._use_counts()

    def _use_counts(self) -> list[tuple[int, int]]:
        return [(torch_private.storage_use_count(storage), storage.data_ptr()) for storage, _ in self.results]

    def fits(self, addresses: Sequence[int]) -> bool:
        """Return True if inputs that are read in place have not moved. `addresses`: present addresses of all inputs."""
        return all(addresses[index] == address and not ref.expired() for index, address, ref in self.in_place)

    def is_dead(self) -> bool:
        """Return True if the graph can never be replayed again.

        Either a storage that it reads in place was freed, or a result got another address.
        """
        has_moved = any(
            address != before for (_, address), (_, before) in zip(self._use_counts(), self._baseline, strict=True)
        )
        return has_moved or any(ref.expired() for _, _, ref in self.in_place)

    def overwritten_addresses(self) -> set[int]:
        """Return the addresses of the graph's results, which a replay overwrites and sessions may hold."""
        return {storage.data_ptr() for storage, _ in self.results}

    def held_results(self, released_inputs: Iterable[torch.Tensor] = ()) -> set[int]:
        """Return the indices of results that sessions still hold.

        `released_inputs`: inputs that nothing reads after this run. References to them do not count.
        """
        uses, released_counts = (
            zip(self._use_counts(), self._baseline, strict=True),
            Counter(map(address_of, released_inputs)),
        )
        return {
            i for i, ((count, address), (before, _)) in enumerate(uses) if count - released_counts[address] > before
        }

    def replay(
        self, inputs: Sequence[torch.Tensor], written_inputs: Sequence[int], copied_results: set[int]
    ) -> list[torch.Tensor]:
        """Launch the graph, and return its results.

        Args:
            inputs: the inputs of the region.
            written_inputs: indices of inputs that the graph writes.
            copied_results: indices of results to return as copies.
        """
        _copy_all([(buffer, memory_span(inputs[index])) for index, buffer in self.buffers.items()])
        self.launch()
        self.has_launched = True
        _copy_all(
            [(memory_span(inputs[index]), self.buffers[index]) for index in written_inputs if index in self.buffers]
        )
        new = {i: _new_memory(self.results[i][0]) for i in copied_results}
        _copy_all([(_bytes_of(storage), _bytes_of(self.results[i][0])) for i, storage in new.items()])
        return [_tensor_over(new.get(i, storage), meta) for i, (storage, meta) in enumerate(self.results)]


class RecordedRegion(CompiledRegion):
    """A region that replays recordings of its instructions.

    If a run fits no recording, the instructions run one by one.

    Attributes:
        recordings: the recordings, the least recently used first.
    """

    def __init__(self, job: Any, recorder: Recorder) -> None:
        """Prepare to record the region of a `CompilationJob`."""
        super().__init__(
            "graphs", self._replay_next, job.template, job.region, job.relation, self._overwrite_numbers, job.aliases
        )
        self._template, self._recorder, self._runtime = job.template, recorder, recorder.runtime
        self._steps = [(step, self._takes_float(step)) for step in self.steps if step.op not in SKIPPED_OPS]
        consumed = {*job.template.consumed} - {*self.region.written_inputs}
        self._consumed_inputs = [i for i, place in enumerate(self.region.inputs) if place in consumed]
        self._written_inputs = [i for i, place in enumerate(self.region.inputs) if place in self.region.written_inputs]
        self._numbers: torch.Tensor | None = None  # the varying floats
        self.recordings: list[Recording] = []
        self._next_recording: Recording | None = None  # for the present run
        self._has_overwritten = False  # the last run has launched its graph
        self._copied_results: set[int] = set()
        self._recent_storages: deque[list[StorageWeakRef]] = deque(maxlen=_RECENT_RUNS)
        self._weights: frozenset[int] = frozenset()
        self._without_weights = 0
        self._runs = self._record_attempts = 0

    def drop_recordings(self, *, only_dead: bool = False) -> None:
        """Drop all recordings. If `only_dead`, drop only recordings that can never be replayed again."""
        self.recordings = [recording for recording in self.recordings if only_dead and not recording.is_dead()]

    @property
    def may_have_overwritten(self) -> bool:
        """True if the latest replay may have overwritten an input that the region consumes.

        A replay writes its results into the memory of earlier results, which may be inputs of this run.
        """
        return bool(self._consumed_inputs) and self._has_overwritten

    def copy_overwritten_inputs(self, env: Environment) -> None:
        """Copy the inputs that a replay would overwrite, as `CompiledRegion.copy_overwritten_inputs` does."""
        addresses = {address for recording in self.recordings for address in recording.overwritten_addresses()}
        for index, tensor in self._released_inputs(self._inputs(env)).items():
            if address_of(tensor) in addresses:
                copy = memory_span(tensor).clone()
                env[self.region.inputs[index]] = copy.as_strided(tensor.shape, tensor.stride(), 0)

    def _released_inputs(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return inputs that nothing reads after this run: consumed inputs that share memory with no other input."""
        addresses = Counter(map(address_of, tensors))
        consumed = {index: tensors[index] for index in self._consumed_inputs}
        return {index: tensor for index, tensor in consumed.items() if addresses[address_of(tensor)] == 1}

    def check_guard(self, env: Environment) -> int | None:
        """Check a run as in `CompiledRegion.check_guard`, and choose or record a graph for `run`.

        Return None also if no recording fits and the region is not recorded now.

        Raises:
            RuntimeError: the region cannot be recorded.
        """
        n = super().check_guard(env)
        self._next_recording = None if n is None else self._find_recording(self._inputs(env))
        return None if self._next_recording is None else n

    def _overwrite_numbers(self, data: torch.Tensor) -> torch.Tensor:
        """Upload the varying floats of a run into the tensor that the graphs read, and return this tensor."""
        assert self._numbers is not None
        self._runtime.overwrite(self._numbers, data)
        return self._numbers

    def _replay_next(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Replay the recording that `check_guard` chose. Another thread may have dropped it from `recordings` since."""
        recording, self._next_recording = self._next_recording, None
        assert recording is not None
        recording.has_launched = False
        try:
            results = self._launch(recording, inputs)
        finally:
            self._has_overwritten = recording.has_launched
        self._recorder.names.forget(results)  # each replay changes the contents of their memory
        return results

    def _launch(self, recording: Recording, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return recording.replay(inputs, self._written_inputs, self._copied_results)

    def _fits(self, recording: Recording, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> bool:
        """Return True if a recording can be replayed with these inputs under the present numeric settings."""
        del tensors
        return recording.settings == self._recorder.settings.current and recording.fits(addresses)

    def _find_recording(self, tensors: Sequence[torch.Tensor]) -> Recording | None:
        self._runs += 1
        addresses = [tensor.data_ptr() for tensor in tensors]
        for recording in self.recordings:
            if not self._fits(recording, tensors, addresses):
                continue
            held_results = recording.held_results(self._released_inputs(tensors).values()) - self._copied_results
            if held_results or recording.is_dead():
                self._copied_results |= held_results
                self.recordings = [other for other in self.recordings if other is not recording]
                return None
            self._without_weights = 0
            self.recordings = [*[other for other in self.recordings if other is not recording], recording]
            return recording
        weights = self._find_weights(tensors)
        if weights is None or self._record_attempts > RECORDINGS + self._runs // _RUNS_PER_RECORDING:
            return None
        self._record_attempts += 1
        new_recording = self._record(tensors, weights)
        if new_recording is not None:
            self.recordings = [
                *[other for other in self.recordings if not other.is_dead()][1 - RECORDINGS :],
                new_recording,
            ]
        return new_recording

    def _find_weights(self, tensors: Sequence[torch.Tensor]) -> frozenset[int] | None:
        """Return the weights: indices of inputs whose storages were inputs of recent runs, too.

        Return None in the first run. If a former weight has a new storage, return None for `_RECENT_RUNS` runs.
        """
        ignored = self.growing_inputs.union(self._consumed_inputs)
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        recent_by_input = [{recent[i].cdata for recent in self._recent_storages} for i in range(len(storages))]
        weights = frozenset(
            [i for i, ref in enumerate(storages) if ref.cdata in recent_by_input[i] and i not in ignored]
        )
        self._recent_storages.append(storages)
        if len(self._recent_storages) == 1:
            return None
        if not weights or not weights >= self._weights:  # of another session, or of new weights
            self._without_weights += 1
            if self._without_weights < _RECENT_RUNS:
                return None
        self._weights, self._without_weights = weights, 0
        return weights

    def _record(self, tensors: Sequence[torch.Tensor], weights: frozenset[int]) -> Recording | None:
        in_place = [(i, tensors[i].data_ptr(), StorageWeakRef(tensors[i].untyped_storage())) for i in sorted(weights)]
        moving = [i for i in range(len(tensors)) if i not in weights]
        if not weights.issuperset([i for alias in self._aliases for i in (alias.view, alias.base)]):
            return None
        buffers = {i: memory_span(tensors[i]).clone() for i in moving}
        example_inputs = list(tensors)
        for i, buffer in buffers.items():
            example_inputs[i] = buffer.as_strided(tensors[i].shape, tensors[i].stride(), 0)
        if self._floats and self._numbers is None:
            self._numbers = self._runtime.receive(torch.zeros(8 * len(self._floats), dtype=torch.uint8))
        launch, results, nbytes = self._recorder.record(lambda: self._run_steps(example_inputs))
        layouts = [(tensor.untyped_storage(), meta_of(tensor)) for tensor in results]
        memories = [address_of(tensor) for tensor in (*results, *tensors, *buffers.values()) if tensor.nbytes]
        if any(memories.count(storage.data_ptr()) > 1 for storage, _ in layouts):
            raise ValueError("a result shares memory with another result or with an input")
        del results
        nbytes += sum([buffer.nbytes for buffer in buffers.values()])
        return Recording(launch, layouts, in_place, buffers, self._recorder.settings.current, nbytes)

    def _run_steps(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        env, fresh = self._environment(inputs), frozenset(self.region.owned_results)
        if self._numbers is not None:
            for place, number in zip(self._floats, self._numbers.view(torch.float64).unbind(), strict=True):
                env[place] = number
        for step, takes_float in self._steps:
            self._run_step(step, takes_float, env)
            for place in step.release:
                if place not in fresh:
                    env[place] = None
        return [env[place] for place in self.region.owned_results]

    def _environment(self, inputs: Sequence[Any]) -> Environment:
        template = self._template
        env = [*template.constants, *self.relation.example.slots, *[None] * (template.inputs + template.computed)]
        for place, tensor in zip(self.region.inputs, inputs, strict=True):
            env[place] = tensor
        return env

    def _run_step(self, step: CompiledStep, takes_float: bool, env: Environment) -> None:
        if not takes_float:
            step.store(env)
            return
        args, kwargs = step.arguments_from(env)
        results = call_with_tensors(step.op, args, kwargs, lambda op, given: op(*given))
        for result, place in step.makes:
            env[place] = results[result] if step.returns_list else results

    def _takes_float(self, step: CompiledStep) -> bool:
        """Return True if an argument of the step is a varying float."""
        sources = [*step.arguments, *[source for _, source in step.keywords]]
        items = [item for source in sources if isinstance(source, ListSource) for item in source.items]
        return any(place in self._floats for place in (*sources, *items))


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy dense tensors to other dense tensors, all with one kernel launch."""
    if pairs:
        targets, sources = zip(
            *[(target.view(torch.uint8), source.view(torch.uint8)) for target, source in pairs], strict=True
        )
        torch._foreach_copy_(list(targets), list(sources))


def _new_memory(like: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.empty(like.nbytes(), dtype=torch.uint8, device=like.device).untyped_storage()


def _tensor_over(storage: torch.UntypedStorage, meta: TensorMeta) -> torch.Tensor:
    return torch.empty(0, dtype=meta.dtype, device=storage.device).set_(storage, meta.offset, meta.shape, meta.stride)


def memory_span(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory from its first to its last element as a dense 1-dim view, including gaps."""
    return tensor.as_strided((max(meta_of(tensor).extent - int(tensor.storage_offset()), 0),), (1,))


def difference_in_place(compiled: RecordedRegion, env: Environment, mismatch: Callable[[int, Any, Any], str]) -> str:
    """Return how the results of a recording differ from the results of its instructions; empty if they agree.

    Recording and instructions run on the session's own values, because the graph reads weights at their addresses.
    Afterwards the written inputs are restored. `mismatch` returns how two results at a place differ; empty if equal.
    """
    region = compiled.region
    written_storages = {address_of(env[place]): env[place].untyped_storage() for place in region.written_inputs}
    before = {address: storage.clone() for address, storage in written_storages.items()}
    expected, actual = list(env), list(env)
    try:
        for step in compiled.steps:
            step.run(expected)
        after = {address: _bytes_of(storage).clone() for address, storage in written_storages.items()}
        for address, storage in written_storages.items():
            storage.copy_(before[address])
        try:
            compiled.run(actual)
        except Exception as error:
            return f"it raised {type(error).__name__}: {error}"
        for place in compiled.growing_results:
            actual[place] = actual[place].clone(memory_format=torch.contiguous_format)
        places = [place for step in compiled.steps for _, place in step.makes]
        for place in [
            p for p in dict.fromkeys(places) if isinstance(actual[p], torch.Tensor) and expected[p] is not None
        ]:
            if difference := mismatch(place, expected[place], actual[place]):
                return difference
        written_otherwise = [
            place
            for place in region.written_inputs
            if mismatch(place, _over_memory(env[place], after[address_of(env[place])]), env[place])
        ]
        if written_otherwise:
            return "a written input has different contents"
    finally:
        for address, storage in written_storages.items():
            storage.copy_(before[address])
    return ""


def _over_memory(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return _tensor_over(memory.untyped_storage(), meta_of(tensor))


def bitwise_mismatch(_: int, expected: torch.Tensor, actual: torch.Tensor) -> str:
    """Return how two results differ, or an empty text if all bits are equal."""
    if layout := layout_difference(expected, actual):
        return layout
    is_equal = torch.equal(_bits(expected), _bits(actual))
    return "" if is_equal else f"a result of shape {tuple(actual.shape)} differs in some bits"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
