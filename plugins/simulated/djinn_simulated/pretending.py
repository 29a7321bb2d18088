"""Simulated execution of ops: results have the right shapes, and times come from a roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import attrs
import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from djinn.planning import DeviceCapabilities
from djinn_core.torch_private import schema_of

START: Final = 5e-6  # start time of an op in seconds, as in the built-in cost model
_WHOLE_LAYERS: Final = frozenset({"aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"})
_LIMIT: Final = 16384  # number of cached calls


@attrs.frozen
class Layout:
    """Shape, strides and dtype of a result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that a tensor of this layout takes."""
        if 0 in self.shape:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))) * self.dtype.itemsize


@attrs.frozen
class SimulatedCall:
    """Cached simulation of a call: the seconds, and for each result its layout or the argument that it aliases."""

    results: tuple[Layout | int | None, ...]
    several: bool
    seconds: float


class SimulationMode(TorchDispatchMode):
    """Dispatch mode in which ops return zeros of the right layout and take their roofline time.

    Views are computed, because they cost nothing. Ops with data-dependent results or without a meta kernel are computed from the
    zeros.
    """

    known: dict[Any, SimulatedCall | None] = {}  # noqa: RUF012 - for all devices of a process; the device is part of the key
    whole: set[Any] = set()  # noqa: RUF012 - ops without a decomposition

    def __init__(
        self, device: DeviceCapabilities, zeros: Callable[[int], torch.Tensor], passes: Callable[[float], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._zeros, self._passes = device, zeros, passes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Simulate `func`."""
        kwargs = kwargs or {}
        if func not in self.whole:
            with self:  # so that ops of a decomposition arrive here, too
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
            self.whole.add(func)
        key = (self._device.id, func, _key(args), _key(tuple(kwargs.items())))
        try:
            pretended = self.known[key]
        except KeyError:
            pretended = self._simulated(func, args, kwargs)
            if len(self.known) >= _LIMIT:
                self.known.clear()
            self.known[key] = pretended
        except TypeError:  # an unhashable argument
            pretended = self._simulated(func, args, kwargs)
        if pretended is None:
            decomposed = func(*args, **kwargs)
            if not _is_view(func):
                tensors = list(_tensors([*args, *kwargs.values()]))
                self._passes(self._seconds(_kernel_flops(func, tensors), [*tensors, *_tensors([decomposed])]))
            return decomposed
        self._passes(pretended.seconds)
        results = [self._made(result, args, kwargs, func) for result in pretended.results]
        return results if pretended.several else results[0] if results else None

    def _made(self, result: Layout | int | None, args: Any, kwargs: Any, func: Any) -> Any:
        if isinstance(result, Layout):
            memory = self._zeros(result.nbytes or result.dtype.itemsize).view(result.dtype)
            return memory.as_strided(result.shape, result.stride)
        return None if result is None else _argument(result, args, kwargs, func)

    def _simulated(self, func: Any, args: Any, kwargs: Any) -> SimulatedCall | None:
        """Return the cacheable simulation of a call; None if the op must run."""
        if _is_view(func):
            return None
        schema = schema_of(func)
        try:
            there = _on_meta(args), {name: _on_meta(value) for name, value in kwargs.items()}
            if "device" in there[1]:
                there[1]["device"] = "meta"
            made = func(*there[0], **there[1])
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return None  # data-dependent, without a meta kernel, or failing: running it fails in the same way
        several = len(schema.returns) > 1 or isinstance(made, list | tuple)
        values = list(made) if isinstance(made, list | tuple) else [] if made is None else [made]
        targets = [_written(r, schema) for r in schema.returns] if len(schema.returns) == len(values) else []
        results = tuple(
            targets[i] if targets and targets[i] is not None else _layout(value) for i, value in enumerate(values)
        )
        operands = list(_tensors([*there[0], *there[1].values()]))
        formula = flop_counter.flop_registry.get(func.overloadpacket)
        flops = formula(*there[0], **there[1], out_val=made) if formula is not None else _kernel_flops(func, operands)
        return SimulatedCall(results, several, self._seconds(flops, [*operands, *_tensors(values)]))

    def _seconds(self, flops: float, tensors: Sequence[torch.Tensor]) -> float:
        """Return the roofline seconds of a call: the longer of arithmetic and memory traffic."""
        nbytes = sum(t.numel() * t.dtype.itemsize for t in tensors)
        flops = flops or float(max((t.numel() for t in tensors), default=0))
        return START + max(flops / (self._device.flops or 2e13), nbytes / (self._device.bandwidth or 5e11))


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(func).returns)


def _kernel_flops(func: Any, given: Sequence[torch.Tensor]) -> float:
    """Return the FLOPs of kernels that PyTorch's counter does not know: CPU attention and fused transformer layers."""
    name = func.name()
    if "scaled_dot_product" in name and len(given) > 1:
        query, key = given[:2]
        return 4.0 * query.numel() * key.shape[-2]
    if name in _WHOLE_LAYERS and given[0].ndim == 3:
        rows = given[0].shape[0] * given[0].shape[1]
        products = sum(2.0 * rows * weight.numel() for weight in given if weight.ndim == 2)
        return products + 4.0 * given[0].numel() * given[0].shape[1]
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


def _written(returned: Any, schema: Any) -> int | None:
    """Return the position of the argument that a result aliases; None for a new result."""
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
