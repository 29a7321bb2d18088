"""Simulated execution of ops: results have the right shapes, and times come from a roofline model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import attrs
import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from djinn.planning import DeviceCapabilities
from djinn_core.torch_private import schema_of

OP_START_SECONDS: Final = 5e-6  # start time of an op in seconds, as in the built-in cost model
_WHOLE_LAYERS: Final = frozenset({"aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"})
_MAX_CACHED_CALLS: Final = 16384


@attrs.frozen
class Layout:
    """Shape, strides and dtype of a result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a tensor of this layout takes."""
        if 0 in self.shape:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))) * self.dtype.itemsize


@attrs.frozen
class SimulatedCall:
    """Cached simulation of a call.

    Attributes:
        results: for each result, its layout, or the position of the argument that it aliases, or None if it is no tensor.
        returns_several: True if the op returns a list or tuple.
        seconds: simulated time of the call.
    """

    results: tuple[Layout | int | None, ...]
    returns_several: bool
    seconds: float


class SimulationMode(TorchDispatchMode):
    """Dispatch mode in which ops return zeros of the right layout and take the time that a roofline model predicts.

    Views are computed, because they cost nothing. Ops with data-dependent results, or without a meta kernel, run on the
    zeros.

    Attributes:
        calls: simulations by device, op and arguments; None if the op must run.
        without_decomposition: ops that have no decomposition.
    """

    calls: dict[Any, SimulatedCall | None] = {}  # noqa: RUF012 - for all devices of a process; the device is part of the key
    without_decomposition: set[Any] = set()  # noqa: RUF012 - ops without a decomposition

    def __init__(
        self, device: DeviceCapabilities, zeros: Callable[[int], torch.Tensor], add_seconds: Callable[[float], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._zeros, self._add_seconds = device, zeros, add_seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the simulated result of `func`, and add the time of the call to the device's time."""
        kwargs = kwargs or {}
        if func not in self.without_decomposition:
            with self:  # so that ops of a decomposition arrive here, too
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
            self.without_decomposition.add(func)
        key = (self._device.id, func, _key(args), _key(tuple(kwargs.items())))
        try:
            call = self.calls[key]
        except KeyError:
            call = self._simulate(func, args, kwargs)
            if len(self.calls) >= _MAX_CACHED_CALLS:
                self.calls.clear()
            self.calls[key] = call
        except TypeError:  # an unhashable argument
            call = self._simulate(func, args, kwargs)
        if call is None:
            output = func(*args, **kwargs)
            if not _is_view(func):
                tensors = list(_tensors([*args, *kwargs.values()]))
                self._add_seconds(self._seconds(_kernel_flops(func, tensors), [*tensors, *_tensors([output])]))
            return output
        self._add_seconds(call.seconds)
        results = [self._result(result, args, kwargs, func) for result in call.results]
        return results if call.returns_several else results[0] if results else None

    def _result(self, result: Layout | int | None, args: Any, kwargs: Any, func: Any) -> Any:
        if isinstance(result, Layout):
            memory = self._zeros(result.nbytes or result.dtype.itemsize).view(result.dtype)
            return memory.as_strided(result.shape, result.stride)
        return None if result is None else _argument(result, args, kwargs, func)

    def _simulate(self, func: Any, args: Any, kwargs: Any) -> SimulatedCall | None:
        """Return the simulation of a call, or None if the op must run: it is a view, or no layouts can be predicted."""
        if _is_view(func):
            return None
        schema = schema_of(func)
        try:
            meta_call = _on_meta(args), {name: _on_meta(value) for name, value in kwargs.items()}
            if "device" in meta_call[1]:
                meta_call[1]["device"] = "meta"
            output = func(*meta_call[0], **meta_call[1])
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return None  # data-dependent, without a meta kernel, or failing: running it fails in the same way
        returns_several = len(schema.returns) > 1 or isinstance(output, list | tuple)
        values = list(output) if isinstance(output, list | tuple) else [] if output is None else [output]
        targets = [_aliased_argument(r, schema) for r in schema.returns] if len(schema.returns) == len(values) else []
        results = tuple(
            targets[i] if targets and targets[i] is not None else _layout(value) for i, value in enumerate(values)
        )
        operands = list(_tensors([*meta_call[0], *meta_call[1].values()]))
        formula = flop_counter.flop_registry.get(func.overloadpacket)
        flops = (
            formula(*meta_call[0], **meta_call[1], out_val=output)
            if formula is not None
            else _kernel_flops(func, operands)
        )
        return SimulatedCall(results, returns_several, self._seconds(flops, [*operands, *_tensors(values)]))

    def _seconds(self, flops: float, tensors: Sequence[torch.Tensor]) -> float:
        """Return the seconds of a call: its start, plus the longer of the times for arithmetic and for memory traffic."""
        nbytes = sum(t.numel() * t.dtype.itemsize for t in tensors)
        flops = flops or float(max((t.numel() for t in tensors), default=0))
        return OP_START_SECONDS + max(flops / (self._device.flops or 2e13), nbytes / (self._device.bandwidth or 5e11))


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(func).returns)


def _kernel_flops(func: Any, operands: Sequence[torch.Tensor]) -> float:
    """Return the FLOPs of CPU attention or a fused transformer layer, which PyTorch cannot count, else 0."""
    name = func.name()
    if "scaled_dot_product" in name and len(operands) > 1:
        query, key = operands[:2]
        return 4.0 * query.numel() * key.shape[-2]
    if name in _WHOLE_LAYERS and operands[0].ndim == 3:
        rows = operands[0].shape[0] * operands[0].shape[1]
        products = sum(2.0 * rows * weight.numel() for weight in operands if weight.ndim == 2)
        return products + 4.0 * operands[0].numel() * operands[0].shape[1]
    return 0.0


def _key(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    if isinstance(argument, list | tuple):
        return tuple([_key(item) for item in argument])
    return type(argument), argument


def _on_meta(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return torch.empty_strided(tuple(argument.shape), argument.stride(), dtype=argument.dtype, device="meta")
    if isinstance(argument, list | tuple):
        return [_on_meta(item) for item in argument]
    return argument


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _layout(value: Any) -> Layout | None:
    return Layout(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else None


def _aliased_argument(returned: Any, schema: Any) -> int | None:
    """Return the position of the argument that the result `returned` aliases, or None for a new result."""
    if returned.alias_info is None:
        return None
    marks = set(returned.alias_info.before_set)
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and set(argument.alias_info.before_set) & marks:
            return position
    return None


def _argument(position: int, args: Any, kwargs: Any, func: Any) -> Any:
    if position < len(args):
        return args[position]
    return kwargs[schema_of(func).arguments[position].name]
