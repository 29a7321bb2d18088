"""Op dispatch of calls that C++ does not know: one op becomes one recorded instruction.

C++ repeats cached calls without Python (`djinn_native/csrc/calls.cpp`). For any other call, `record` flattens the
arguments once into a key, looks up the op's results for that key, and appends to the thread's program. A cached call
needs no shape inference, no analysis and no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from djinn_client.interception.device.device_state import Handler, device_state
from djinn_client.interception.device.indexes import check_one_index, index_of_call, leaves_index_open
from djinn_client.interception.device.numeric_settings import as_floats
from djinn_client.interception.native.calls import forget as forget_in_native
from djinn_client.interception.native.generators import bound_state
from djinn_client.interception.native.generators import operand as operand_of
from djinn_client.interception.ops.composite import decompose, is_decomposed
from djinn_client.interception.ops.cpu_operands import CpuOperand, in_lists_of_numbers, upload_operands
from djinn_client.interception.recording.append import append, give_own_value, own_call
from djinn_client.interception.recording.append import remember as remember_in_native
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.remote_infer import ask_executor, run_refused
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.shape_inference.foreach_infer import (
    infer_by_element,
    is_over_lists,
    is_refused_for_elements,
)
from djinn_client.interception.shape_inference.formulas import forget_examples, has_formula, infer_by_formula, learn
from djinn_client.interception.shape_inference.inference_cache import inference_cache, make_room
from djinn_client.interception.shape_inference.kernel_warnings import warn_as_kernel
from djinn_client.interception.shape_inference.message_limits import check_given, check_made
from djinn_client.interception.shape_inference.meta_infer import (
    MetaKernelRefused,
    UnknownResult,
    forget_signatures,
    infer,
    learn_dtypes,
    make_elsewhere,
    order_of,
    written_tensors,
)
from djinn_client.interception.shape_inference.meta_overrides import KERNEL_DECIDES, WITH_STATISTICS, is_random
from djinn_client.interception.shape_inference.scalar_ranges import (
    infers_for_any_float,
    takes_any_float,
    without_floats,
)
from djinn_client.interception.shape_inference.trials import warns_each_time
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote, wrap
from djinn_client.torch_dispatch import CGenerator, class_of_script_object
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.operators import EXCHANGE_RANDOM_STATE, is_custom
from djinn_core.ir.program import Call, Slot, canonical_nan
from djinn_core.system.gc_pause import collect_later
from djinn_core.torch_private import schema_of

CALLS_LIMIT = 65536  # cached calls; the older half is evicted at this limit

_handlers: Final = device_state.handlers
_NEW: Any = object()  # marker for a cache miss
_DTYPE, _SIZE = torch.dtype, torch.Size
_SHORT: Final = 64  # lists shorter than this have cached length objects in keys
_LENGTHS: Final = tuple(object() for _ in range(_SHORT))


def handles(*funcs: Any, repeats: bool = False) -> Callable[[Handler], Handler]:
    """Register the decorated function as handler of these overloads, in place of `record`.

    `repeats`: True if the C++ fast path may replay the calls that the handler recorded.
    """

    def register(handler: Handler) -> Handler:
        for func in funcs:
            if repeats:
                device_state.repeated.add(id(func))
            if _handlers.setdefault(id(func), handler) is not handler:
                raise AssertionError(f"{func} already has a handler")
        return handler

    return register


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the op's handler if it has one. Otherwise record the op."""
    return _handlers.get(id(func), record)(func, args, kwargs)


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record one op and return tensors for its results.

    Raises:
        Exception: the error that eager PyTorch would raise for these arguments.
    """
    key: list[Any] = [id(func)]
    operands: list[LazyTensor] = []
    try:
        _flatten(args, key, operands)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                _flatten((value,), key, operands)
    except CpuOperand:
        return _with_cpu_operands(func, args, kwargs)
    call = inference_cache.calls.get(tuple(key), _NEW)
    any_float = False
    if call is _NEW and float in key and infers_for_any_float(func):
        call = inference_cache.calls.get(without_floats(key), _NEW)
        any_float = call is not _NEW
    if call is _NEW:
        return _record_unknown(func, args, kwargs, key, operands)
    if call is not None or not inference_cache.drawing:
        remember_in_native(func, args, call, any_float)
    if call is None:
        drawing = inference_cache.drawing.get(tuple(key)) if inference_cache.drawing else None
        return _same_value(operands[0]) if drawing is None else _draw(drawing, operands, slots_of(args, kwargs))
    if call.cached_outcome is None:
        call.cache_outcome()
    slots = call.slots
    return append(call, operands, slots_of(args, kwargs) if slots is None else slots)


def _with_cpu_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_decomposed(func):
        return _decompose_always(func, args, kwargs)
    fakes = (a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, FakeTensor))
    if (mode := next((fake.fake_mode for fake in fakes), None)) is not None:
        return _run_as_fake(mode, func, args, kwargs)
    if (numbers := in_lists_of_numbers(func, args)) is not None:
        return record(*numbers, kwargs)
    if is_over_lists(func):
        return decompose(func, args, kwargs)  # one call per element: `copy_` accepts a source on the CPU
    args, kwargs = upload_operands(func, args, kwargs)
    return record(func, args, kwargs)


def _decompose_always(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_custom(func):  # the next server may run the op
        _handlers[id(func)] = decompose
    return decompose(func, args, kwargs)


def _run_as_fake(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return fake tensors for the results of `func`. A tracer is active, so nothing is recorded."""
    args, kwargs = pytree.tree_map_only(LazyTensor, mode.from_tensor, (args, kwargs))
    with mode:
        return func(*args, **kwargs)


def _record_unknown(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: list[Any], operands: list[LazyTensor]
) -> Any:
    """Infer the results of a new call, record it, and cache the inference."""
    if func.name() in port.missing:
        return decompose(func, args, kwargs)  # in this session
    call: Call | None = None
    if has_formula(func):
        slots = slots_of(args, kwargs)
        call = infer_by_formula(func, args, kwargs, key, slots)
        if call is not None:
            check_given(func, (), operands, slots)
            _remember_call(func, args, key, call)
            return append(call, operands, slots)
    if is_custom(func) and not port.is_open() and not current().captures:
        port.sink.open()  # the executors report which custom ops they run
    if is_decomposed(func):
        return _decompose_always(func, args, kwargs)
    if kwargs.get("device") is not None and not is_remote(kwargs["device"]):
        return make_elsewhere(func, args, kwargs)
    if not port.is_open():
        current().prepare()
    slots = slots_of(args, kwargs)
    check_given(func, (*args, *kwargs.values()), operands, slots)
    check_one_index(func, operands)
    if port.fallback is not None and port.fallback.needed(func, args, kwargs, operands, slots):
        return port.fallback.run(func, args, kwargs)
    if is_refused_for_elements(func, args, kwargs, operands, slots):
        return decompose(func, args, kwargs)
    refusal: MetaKernelRefused | None = None
    try:
        with collect_later:  # meta kernels import modules; nothing else may run during an import
            call = infer_by_element(func, args, kwargs, operands)
            if call is None:
                call = infer(func, args, kwargs, operands[0].remote.meta.device if operands else 0)
    except UnknownResult:
        pass  # later executor errors have another cause
    except MetaKernelRefused as error:
        refusal = error
    if call is None:
        for position in written_tensors(func, args, kwargs):
            give_own_value(operands[position])
    if refusal is not None and is_over_lists(func):
        return decompose(func, args, kwargs)  # the error is about a list element
    if refusal is not None:
        return run_refused(refusal, func, args, kwargs, operands, slots)
    if call is None:
        return _ask_for_results(func, args, kwargs, key, operands, slots)
    inference_cache.inferred += 1
    floats = as_floats(func, args, call)
    if floats is not None:
        return record(func, floats, kwargs)
    check_made(func, call)
    if _changes_nothing(func, call):
        _remember(tuple(key), None)
        remember_in_native(func, args, None, False)
        return _same_value(operands[0])
    if call.random and index_of_call(call):
        _remember(tuple(key), None)
        inference_cache.drawing[tuple(key)] = call
        return _draw(call, operands, slots)
    warns = warn_as_kernel(func, kwargs, call) or _resizes_out(func, call)
    warns = warns or warns_each_time(func, args, (m.dtype for m in call.results if m is not None))
    if warns or leaves_index_open(kwargs):
        return append(call, operands, slots)
    if has_formula(func):
        learn(key, call)
    if not _holds_numbers_in_tensors((args, *kwargs.values())):
        call = call.with_slots(slots)
    _remember_call(func, args, key, call)
    return append(call, operands, slots)


def _resizes_out(func: Any, call: Call) -> bool:
    """Return True if the call resizes an `out` tensor that has elements.

    PyTorch warns of such a resize at each call.
    """
    before = call.operands
    resized = any(before[p].numel and before[p].shape != now.shape for p, now in call.changes if p in call.writes)
    return resized and any(argument.is_out for argument in schema_of(func).arguments)


def _remember_call(func: Any, args: tuple[Any, ...], key: list[Any], call: Call) -> None:
    _remember(tuple(key), call)
    any_float = infers_for_any_float(func) and takes_any_float(func, call)
    if any_float and float in key:
        _remember(without_floats(key), call.with_slots(None))
    remember_in_native(func, args, call, any_float)


def _ask_for_results(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: list[Any],
    operands: list[LazyTensor],
    slots: tuple[Slot, ...],
) -> Any:
    device = operands[0].remote.meta.device if operands else 0
    if is_random(func) and device:
        with _own_random_state(device):
            return ask_executor(func, args, kwargs, operands, slots).results
    if func not in KERNEL_DECIDES and written_tensors(func, args, kwargs):
        return run_refused(MetaKernelRefused(), func, args, kwargs, operands, slots)
    results = ask_executor(func, args, kwargs, operands, slots)
    if func in KERNEL_DECIDES:
        _remember(tuple(key), results.call)
    elif func in WITH_STATISTICS:
        learn_dtypes(results.call)
    return results.results


def _draw(call: Call, operands: list[LazyTensor], slots: tuple[Slot, ...]) -> Any:
    """Append a random op on a device index other than 0. The op draws from the random state of that index."""
    with _own_random_state(index_of_call(call)):
        return append(call, operands, slots)


@contextmanager
def _own_random_state(index: int) -> Iterator[None]:
    """Context manager in which recorded ops use the random state of an index instead of the session's state."""
    state = bound_state(index)
    exchange = own_call(EXCHANGE_RANDOM_STATE, (state.remote.meta,), has_result=False, writes=(0,))
    append(exchange, [state], ())
    try:
        yield
    finally:
        append(exchange, [state], ())


def _flatten(args: Iterable[Any], key: list[Any], operands: list[LazyTensor]) -> None:
    """Append the arguments to the call's cache key, and the tensors among them to `operands`.

    Scalars that compare equal but differ in type or sign have different keys. All nans of one sign have the same key.
    """
    for a in args:
        kind = type(a)
        if kind is int or a is None or kind is _DTYPE:
            key.append(a)
        elif kind is list or kind is tuple or kind is _SIZE:
            length = len(a)
            key.append(_LENGTHS[length] if length < _SHORT else (length,))
            _flatten(a, key, operands)
        elif kind is float:
            key.append(kind)
            key.append((a or repr(a)) if a == a else canonical_nan(a))  # noqa: PLR0124 - False for nan
        else:
            _flatten_rare(a, kind, key, operands)


def _flatten_rare(a: Any, kind: type, key: list[Any], operands: list[LazyTensor]) -> None:
    key.append(kind)
    if kind is bool:
        key.append(a)
    elif isinstance(a, LazyTensor):
        key.append(a.remote.meta)
        operands.append(a)
    elif isinstance(a, torch.Tensor):
        if a.dim() > 0:
            raise CpuOperand
        key.append(a.dtype)
    elif isinstance(a, (list, tuple)):
        key.append((len(a),))
        _flatten(a, key, operands)
    elif isinstance(a, CGenerator):
        state = operand_of(a)
        key.append(state is None)
        if state is not None:
            operands.append(state)
    elif isinstance(a, torch.ScriptObject):
        raise UnsupportedOperation(
            f"a {class_of_script_object(a)}, in which modules of torch.ao.quantization keep their weights, cannot be sent to "
            "an executor, because it is an object of this process. Run the module on the CPU, or dequantize its weights"
        )
    else:
        key.append(repr(a) if kind is complex else a)


def slots_of(args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[Slot, ...]:
    """Return the numbers among the arguments, in order. 0-dim CPU tensors count as numbers."""
    slots: list[Slot] = []
    _gather(args, slots)
    _gather(kwargs.values(), slots)
    return tuple(slots)


def _gather(args: Iterable[Any], slots: list[Slot]) -> None:
    for a in args:
        kind = type(a)
        if kind is int or kind is float:
            slots.append(a if a == a else canonical_nan(a))  # noqa: PLR0124 - False for nan
        elif isinstance(a, (list, tuple)):
            _gather(a, slots)
        elif isinstance(a, torch.Tensor) and not isinstance(a, LazyTensor):
            number = a.item()
            _gather((int(number) if isinstance(number, bool) else number,), slots)
        elif kind is complex:
            _gather((a.real, a.imag), slots)


def _holds_numbers_in_tensors(args: Iterable[Any]) -> bool:
    """Return True if an argument is a 0-dim CPU tensor. The key of a call does not contain the tensor's value."""
    return any(
        _holds_numbers_in_tensors(a)
        if isinstance(a, (list, tuple))
        else isinstance(a, torch.Tensor) and not isinstance(a, LazyTensor)
        for a in args
    )


def _remember(key: tuple[Any, ...], call: Call | None) -> None:
    make_room(inference_cache.calls, CALLS_LIMIT)
    inference_cache.calls[key] = call


def forget_calls() -> None:
    """Clear the cache of inferred calls, so that result metadata and supported ops are determined again."""
    inference_cache.calls.clear()
    inference_cache.drawing.clear()
    forget_examples()
    forget_in_native()


def forget_learnt_calls() -> None:
    """Drop cached call results of an ended session. Other devices may lay out results differently."""
    forget_calls()
    forget_signatures()
    inference_cache.supported.clear()


def learn_layout(call: Call, result: int, stride: tuple[int, ...]) -> None:
    """Predict `stride` for the result number `result` of calls like `call`, because the old prediction was wrong."""
    meta = call.results[result]
    order = order_of(meta.shape, stride) if meta is not None else None
    if order is None:
        return
    call.signature.orders[result] = order
    forget_examples(call.signature)
    for key, cached_call in list(inference_cache.calls.items()):
        if cached_call is not None and cached_call.signature is call.signature:
            inference_cache.calls.pop(key, None)
    forget_in_native(call.signature)


def _changes_nothing(func: Any, call: Call) -> bool:
    """Return True if the result equals the first operand: `detach()`, a view of the same shape, a whole slice."""
    returns = schema_of(func).returns
    return (
        len(returns) == 1
        and returns[0].alias_info is not None
        and not returns[0].alias_info.is_write
        and not call.writes
        and not call.sequence
        and call.aliases == (0,)
        and call.results[0] is call.operands[0]
    )


def _same_value(tensor: LazyTensor) -> LazyTensor:
    """Return another tensor for the value of `tensor`, without recording an op."""
    return wrap(tensor.remote)


def _check_extent(
    tensor: LazyTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> None:
    """Refuse a view beyond the end of its storage, even in a cached call: the cache key contains no storage size.

    Raises:
        RuntimeError: the error of eager PyTorch.
    """
    value = tensor.remote
    offset = value.meta.offset if storage_offset is None else storage_offset
    itemsize, nbytes = value.meta.dtype.itemsize, value.storage.nbytes
    reach = (sum((n - 1) * step for n, step in zip(size, stride, strict=False)) + offset + 1) * itemsize
    if 0 not in size and reach > nbytes:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize {itemsize} "
            f"requiring a storage size of {reach} are out of bounds for storage of size {nbytes}"
        )


@handles(torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default)
def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check_extent(*args, **kwargs)
    return record(func, args, kwargs)


@handles(torch.ops.aten.as_strided_copy.default)
def _as_strided_copy(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a view and a copy of it.

    The view is created on the executor that holds the storage; other executors of a pool may hold only a part.
    """
    view = _as_strided(torch.ops.aten.as_strided.default, args, kwargs)
    return record(torch.ops.aten.clone.default, (view,), {"memory_format": torch.contiguous_format})


@handles(torch.ops.aten.as_strided_scatter.default)
def _as_strided_scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `aten::as_strided_scatter`.

    If the op may write outside its first operand, record a view and a copy op on a copy of the storage instead.
    """
    result = _scatter(*args, **kwargs)
    return record(func, args, kwargs) if result is None else result


def _scatter(
    target: LazyTensor, src: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """Copy the storage of `target`, write `src` into the copy, and return a view of the copy, laid out like `target`.

    Return None if the op itself can be recorded: `target` covers its storage, or is expanded, conjugated or negated, or
    `src` is a CPU tensor.
    """
    meta, nbytes = target.remote.meta, target.remote.storage.nbytes
    itemsize = meta.dtype.itemsize
    whole = meta.offset == 0 and meta.extent == meta.numel and meta.numel * itemsize == nbytes
    if whole or 0 in meta.stride or meta.conj or meta.neg or not isinstance(src, LazyTensor):
        return None
    ops = torch.ops.aten
    if tuple(size) != tuple(src.shape):
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, slice size = {list(size)}"
        )
    memory = record(ops.as_strided.default, (target, [nbytes // itemsize], [1], 0), {})
    copy = record(ops.clone.default, (memory,), {})
    at = meta.offset if storage_offset is None else storage_offset
    record(ops.copy_.default, (_as_strided(ops.as_strided.default, (copy, size, stride, at), {}), src), {})
    return record(ops.as_strided.default, (copy, meta.shape, meta.stride, meta.offset), {})
