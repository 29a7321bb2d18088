"""Recorded calls: instructions recorded once and appended again in bulk (as in CUDA graph replay).

A caller that knows that a function records the same ops whenever its inputs have the same metadata, such as a compiler that
guards it, need not run it again: its instructions are appended with other values, without dispatch and without tensors for
intermediate results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import attrs
import torch

from djinn_client.interception.native.calls import encoded_slots, number_of
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.entry import Entry, SentEntries
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.storage import described
from djinn_client.interception.tensors.upload import upload_copy
from djinn_client.torch_dispatch import increment_versions
from djinn_core.ir.handles import make_handle, storage_of
from djinn_core.ir.program import Call, Slot
from djinn_core.ir.values import TensorMeta

Handles = Callable[[Sequence[int]], tuple[int, ...]]
CONSTANTS_LIMIT = 1 << 20  # bytes of uploads that a recorded call keeps


@attrs.frozen
class _Output:
    """A tensor that the call returns: input `same`, or a new value.

    That is at `place`, and looks into the `storage`-th of those that the call makes.
    """

    same: int = -1
    place: int = -1
    storage: int = 0
    meta: TensorMeta | None = None


@attrs.frozen
class RecordedCall:
    """Instructions over numbered places: inputs first, then constants, then the values the call makes, storage by storage.

    Attributes:
        steps: per instruction its call, the places of its handles, and its scalars.
        constants: values that the call uploaded. written: inputs that it writes into.
        storages: how many storages the call makes. made: per value that it makes over them, the storage and the view.
        kept: of storages that are returned, which they are, their size in bytes and how many views of them there are.
        views: per view that the call makes of a storage that is there before, the input or constant over that storage.
        outputs: the returned objects; an object that is no tensor is returned as it is.
        dead: places of values that are not referenced afterwards. scalars: of all instructions, as C++ keeps them.
    """

    steps: tuple[tuple[Call, Handles, tuple[Slot, ...]], ...]
    constants: tuple[LazyTensor, ...]
    written: tuple[int, ...]
    storages: int
    made: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int, int], ...]
    views: tuple[int, ...]
    outputs: tuple[Any, ...]
    dead: tuple[int, ...]
    scalars: tuple[list[int], list[int]] = ([], [])

    def record(self, inputs: Sequence[LazyTensor]) -> list[Any]:
        """Record the call once more with `inputs`, whose metadata must be as it was; what it returns."""
        given = [*inputs, *self.constants]
        places = [ops.handle(tensor) for tensor in given]
        number = ops.reserve_storages(self.storages)
        first = [make_handle(number + which, 0) for which in range(self.storages)]
        outputs, made = [], []
        for output in self.outputs:
            if not isinstance(output, _Output):
                outputs.append(output)
            elif output.same >= 0:
                outputs.append(inputs[output.same])
            else:
                assert output.meta is not None
                which, view = self.made[output.place - len(given)]
                _, nbytes, views = next(kept for kept in self.kept if kept[0] == which)
                made.append(ops.new_view(*described(output.meta), nbytes, view, views))
                first[which] = make_handle(storage_of(ops.handle(made[-1])), 0)
                outputs.append(made[-1])
        places += [first[which] + view for which, view in self.made]
        places += [ops.next_view(given[place]) for place in self.views]
        written = [inputs[place] for place in self.written]
        increment_versions(written)
        handles = [handle for _, find, _ in self.steps for handle in find(places)]
        recorder = current()
        recorder.dead += [places[place] for place in self.dead]
        bits, kinds = self.scalars
        ops.append_recorded([number_of(call) for call, _, _ in self.steps], handles, bits, kinds, given, written, made)
        return outputs


def record_call(function: Callable[..., Any], inputs: Sequence[LazyTensor]) -> tuple[Any, RecordedCall | None]:
    """Call `function` with `inputs`; its result (a sequence), and the recorded call for appending it again.

    The latter is None if that cannot be known: where the function waited for a result, or wrote into what is neither
    an input nor its own.
    """
    recorder = current()
    sent = SentEntries()
    start, before = len(recorder.entries), recorder.fixed
    uploads, recorder.constants = recorder.constants, []
    recorder.captures.append(sent)
    recorder.fixed = recorder.entries[-1] if recorder.entries else None
    epoch = recorder.epoch
    try:
        outputs = function(*inputs)
        entries = recorder.entries[start:]
        undisturbed = recorder.epoch == epoch and not sent.entries and recorder.watcher is None
        if not undisturbed:
            return outputs, None
        return outputs, _Analysis(inputs, entries, recorder.constants).result(outputs)
    finally:
        recorder.constants = uploads
        recorder.fixed = before
        recorder.captures = [c for c in recorder.captures if c is not sent]


class _NotRecordable(Exception):  # noqa: N818 - a signal between functions of this module
    """The call cannot be recorded in bulk."""


class _Analysis:
    def __init__(
        self, inputs: Sequence[LazyTensor], entries: Sequence[Entry], uploads: Sequence[tuple[int, torch.Tensor, int]]
    ) -> None:
        self.inputs = inputs
        self.entries = entries
        self.input_places: dict[int, int] = {}
        for place, tensor in enumerate(inputs):
            self.input_places.setdefault(tensor.remote.handle, place)
        self.uploads = {handle: (data, device) for handle, data, device in uploads}
        # The place of an input or constant over each storage that is there before.
        self.there = {storage_of(h): len(inputs) + i for i, h in enumerate(self.uploads)}
        self.there |= {storage_of(t.remote.handle): i for i, t in reversed(list(enumerate(inputs)))}
        self.sizes: dict[int, int] = {}  # bytes of each storage that the call makes
        self.new: list[int] = []  # handles that it makes, in order
        self.returned: set[int] = set()  # storages that it returns

    def result(self, outputs: Any) -> RecordedCall | None:
        try:
            return self._result(outputs)
        except _NotRecordable:
            return None

    def _result(self, outputs: Any) -> RecordedCall:
        for entry in self.entries:
            self._look_at(entry)
        used = {handle for entry in self.entries for handle in entry.handles}
        if sum(data.nbytes for data, _ in self.uploads.values()) > CONSTANTS_LIMIT:
            raise _NotRecordable
        known = {*self.input_places, *self.uploads, *self.new}
        if not used <= known or not isinstance(outputs, (list, tuple)):
            raise _NotRecordable
        places = self._places()
        found = tuple(self._output(output, places) for output in outputs)
        kept = {o.place for o in found if isinstance(o, _Output)}
        return RecordedCall(
            steps=tuple((e.call, _finder([places[h] for h in e.handles]), e.slots) for e in self.entries),
            constants=tuple(upload_copy(data, device) for data, device in self.uploads.values()),
            written=tuple(sorted(self._written())),
            storages=len(self.sizes),
            made=tuple((i, view + 1) for i, s in enumerate(self.sizes) for view in range(len(self._views_of(s)))),
            kept=tuple(
                (i, size, len(self._views_of(storage)))
                for i, (storage, size) in enumerate(self.sizes.items())
                if storage in self.returned
            ),
            views=tuple(self.there[storage_of(h)] for h in self._views_of_what_was_there()),
            outputs=found,
            dead=tuple(places[h] for h in self.new if places[h] not in kept),
            scalars=encoded_slots([slot for e in self.entries for slot in e.slots]),
        )

    def _look_at(self, entry: Entry) -> None:
        if entry.call.changes:
            raise _NotRecordable  # an operand is another tensor afterwards
        made = iter(entry.outputs)
        for meta, alias, same, nbytes in entry.call.outcome:
            if same >= 0 or meta is None:
                continue
            handle = next(made)
            self.new.append(handle)
            if alias < 0:
                self.sizes[storage_of(handle)] = nbytes
            elif storage_of(handle) not in self.sizes and storage_of(handle) not in self.there:
                raise _NotRecordable

    def _written(self) -> set[int]:
        written: set[int] = set()
        for entry in self.entries:
            for storage in map(storage_of, entry.writes):
                if self.there.get(storage, len(self.inputs)) < len(self.inputs):
                    written.add(self.there[storage])
                elif storage not in self.sizes:
                    raise _NotRecordable  # writes into a constant
        return written

    def _views_of(self, storage: int) -> list[int]:
        return [h for h in self.new if storage_of(h) == storage]

    def _views_of_what_was_there(self) -> list[int]:
        return [h for h in self.new if storage_of(h) not in self.sizes]

    def _places(self) -> dict[int, int]:
        places = dict(self.input_places)
        at = len(self.inputs)
        made = [handle for storage in self.sizes for handle in self._views_of(storage)]
        ordered = [*self.uploads, *made, *self._views_of_what_was_there()]
        for number, handle in enumerate(ordered):
            places[handle] = at + number
        return places

    def _output(self, output: Any, places: dict[int, int]) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        if not isinstance(output, LazyTensor) or output.requires_grad:
            raise _NotRecordable
        handle = output.remote.handle
        for place, tensor in enumerate(self.inputs):
            if tensor is output:
                return _Output(same=place)
        if handle not in places or handle not in self.new:
            raise _NotRecordable
        storage = storage_of(handle)
        if storage not in self.sizes or storage in self.returned:
            raise _NotRecordable  # PyTorch must know that what it returns shares memory
        self.returned.add(storage)
        return _Output(place=places[handle], storage=list(self.sizes).index(storage), meta=output.remote.meta)


def _finder(places: Sequence[int]) -> Handles:
    if len(places) == 1:
        (only,) = places
        return lambda handles: (handles[only],)
    return itemgetter(*places) if places else lambda _: ()


def is_watched() -> bool:
    """True if an observer, such as `djinn.verify()`, needs every op of this thread as it is recorded."""
    return current().watcher is not None


def metadata_of(inputs: Sequence[LazyTensor]) -> tuple[object, ...]:
    """Guard key of a recorded call: the session, the inputs' metadata, and which inputs share memory or are the same."""
    first: dict[int, int] = {}
    values = [tensor.remote for tensor in inputs]
    shared = tuple([first.setdefault(storage_of(value.handle), i) for i, value in enumerate(values)])
    handles: dict[int, int] = {}
    same = tuple([handles.setdefault(value.handle, i) for i, value in enumerate(values)])
    return (port.sessions_ended, tuple([value.meta for value in values]), shared, same)
