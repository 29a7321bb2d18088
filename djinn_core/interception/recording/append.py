"""Appending one op to this thread's program: its entry, and tensors for its results."""

from __future__ import annotations

from typing import Any, Final

import torch

from djinn_core.interception.native import library as native
from djinn_core.interception.ops.view_chains import LONGEST, shorten_chains
from djinn_core.interception.recording.call_site import user_site
from djinn_core.interception.recording.entry import Entry
from djinn_core.interception.recording.gc_pause import collect_later
from djinn_core.interception.recording.module_calls import at_node
from djinn_core.interception.recording.recorder import Recorder, recorders
from djinn_core.interception.runtime_interface import port
from djinn_core.interception.shape_inference.meta_infer import infer
from djinn_core.interception.shape_inference.write_checks import (
    check_overlap,
    check_resize,
    raises_versions,
    refuses_overlap,
)
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, adopt, wrap
from djinn_core.interception.tensors.storage import Storage, Value
from djinn_core.ir.handles import new_handle
from djinn_core.ir.program import Call, Slot
from djinn_core.ir.values import TensorMeta
from djinn_core.reference_counts import counts_beside
from djinn_core.torch_private import increment_versions

is_inference_mode_enabled: Final = torch.is_inference_mode_enabled  # looked up for each view
is_inference: Final = torch.Tensor.is_inference
_MANY: Final = 1024  # results; making them starts collections


def append(call: Call, operands: list[LazyTensor], slots: tuple[Slot, ...], above: int = 0) -> Any:
    """Append an instruction to this thread's program and return tensors for its results.

    `above`: number of frames above the caller that are certainly Djinn's; see `user_site`.
    """
    if call.new_count > _MANY and not collect_later.busy:
        with collect_later:  # each collection would look at all results that are made here
            return append(call, operands, slots, above + 1)
    if call.changes:
        for changed, new in call.changes:
            check_resize(call.op, changed, new, operands)
            own_value(operands[changed])
    recorder = recorders.thread.recorder
    watcher = recorder.watcher
    if watcher is not None:
        watcher.before(call, operands)
    epoch, overtaken = recorder.epoch, recorder.overtaken
    handles: list[int] = []
    for operand in operands:
        value = operand.remote
        handles.append(value.handle)
        storage = value.storage
        if storage.user is not recorder:
            recorder.order_after(storage)
    if call.writes:
        _note_writes(recorder, call, operands)
    results: list[Any] = []
    for meta, alias, same, nbytes in call.kept_outcome or call.outcome:
        if same >= 0:
            results.append(operands[same])
        elif meta is None:
            results.append(None)
        elif alias < 0:
            handle = new_handle() + 1
            handles.append(handle)
            results.append(wrap(Value(handle, meta, Storage(handle, nbytes, recorder, None, recorder, epoch))))
        else:
            base = operands[alias]
            storage = base.remote.storage
            storage.last = handle = storage.last + 1
            handles.append(handle)
            # Not a write, but another thread that uses the view needs this program first.
            if storage.written is recorder:
                storage.written_at = epoch
            else:
                recorder.claim(storage, epoch)
            results.append(wrap_view(Value(handle, meta, storage), base))
    module = recorder.module
    if module is None and recorder.differentiating:
        module = at_node(recorder)
    entries = recorder.entries
    site = user_site(recorder.call_sites, recorder.module, above)
    entries.append(Entry(call, tuple(handles), slots, site, module))
    port.ops_captured += 1
    if recorder.epoch != epoch or recorder.overtaken != overtaken:
        touched = [operands[i] for i in call.writes] + [r for r in results if r is not None]
        recorder.settle([t.remote.storage for t in operands], [t.remote.storage for t in touched])
    if call.changes:
        for index, meta in call.changes:
            change(operands[index], meta)
    if watcher is not None:
        watcher.after(call, slots, operands, results)
    if len(entries) >= recorder.limit:
        recorder.cut_at_limit()
    return results if call.sequence else results[0] if results else None


def _note_writes(recorder: Recorder, call: Call, operands: list[LazyTensor]) -> None:
    if len(operands) > 1 and refuses_overlap(call.op):
        for written in call.writes:
            check_overlap(call.op, written, operands)
    writes = call.writes
    is_prefix = writes[-1] + 1 == len(writes)  # nearly all ops write their first operands
    targets = operands[: len(writes)] if is_prefix else [operands[written] for written in writes]
    if not any(call.results) and raises_versions(call.op):
        _increment_versions(targets)
    recorder.begin_writes(targets)


def _increment_versions(targets: list[LazyTensor]) -> None:
    """Increment `_version` of each tensor once per occurrence. Inference tensors have no version.

    Raises:
        RuntimeError: the first target is an inference tensor, outside inference mode. Only the first is checked: checking all
            targets takes as long as recording the op.
    """
    if is_inference(targets[0]) and not is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a normal "
            "tensor before doing inplace update.See https://github.com/pytorch/rfcs/pull/17 for more details."
        )
    increment_versions(targets)


def own_value(tensor: LazyTensor) -> None:
    """Give `tensor` a value of its own, before an op that changes its metadata, which others that share it keep."""
    if counts_beside([tensor.remote]) != [1]:  # more than this tensor stand for it
        call = infer(torch.ops.aten.alias.default, (tensor,), {}, tensor.remote.meta.device)
        tensor.remote = append(call, [tensor], ()).remote


def wrap_view(value: Value, base: LazyTensor) -> LazyTensor:
    """A tensor for a view of `base`. It is an inference tensor exactly when its base is one."""
    inference = is_inference(base)
    if inference is not is_inference_mode_enabled():
        with torch.inference_mode(inference):
            return wrap(value)
    view = wrap(value)
    view.depth = depth = base.depth + 1
    if depth == LONGEST:
        shorten_chains()
    return view


def change(tensor: LazyTensor, meta: TensorMeta) -> None:
    """Give `tensor` the metadata that an op changed it to. Its storage has grown if they need more bytes."""
    storage = tensor.remote.storage
    storage.nbytes = max(storage.nbytes, meta.extent * meta.dtype.itemsize)
    adopt(tensor, meta)


if native.ON:
    from djinn_core.interception.native.append import append, own_value
    from djinn_core.interception.native.values import change, wrap_view  # type: ignore[assignment]
