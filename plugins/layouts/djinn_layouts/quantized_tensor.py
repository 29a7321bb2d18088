"""QuantizedTensor: a quantized tensor whose integers are on an executor."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec
import torch

from djinn_client import torch_dispatch
from djinn_client.interception.handler_support import LazyTensor
from djinn_client.tracebacks import for_users
from djinn_core.ir.layout_operators import PER_CHANNEL, PER_TENSOR, QUANTIZED
from djinn_layouts import torch_layouts
from djinn_layouts.parts_tensor import PartsTensor

# Element dtype of each quantized dtype.
ELEMENTS: Final[Mapping[torch.dtype, torch.dtype]] = MappingProxyType(
    {getattr(torch, name): getattr(torch, elements) for name, elements in QUANTIZED}
)
DTYPES: Final = tuple(ELEMENTS)


class PerTensor(msgspec.Struct, frozen=True):
    """Quantizer with one scale and zero point for all elements."""

    scale: float
    zero_point: int

    @property
    def scheme(self) -> torch.qscheme:
        """Quantization scheme of the tensor, the result of `qscheme()`."""
        return torch.per_tensor_affine


class PerChannel(msgspec.Struct, frozen=True, eq=False):
    """Quantizer with a scale and a zero point for each index of dimension `axis`. Both are one-dimensional."""

    scales: LazyTensor
    zero_points: LazyTensor
    axis: int

    @property
    def scheme(self) -> torch.qscheme:
        """Quantization scheme of the tensor, the result of `qscheme()`."""
        has_integer_zero_points = not self.zero_points.dtype.is_floating_point
        return torch.per_channel_affine if has_integer_zero_points else torch.per_channel_affine_float_qparams


Quantizer: TypeAlias = PerTensor | PerChannel


class QuantizedTensor(PartsTensor):
    """A quantized tensor on `remote_accelerator`: its integers as a strided remote tensor, and its quantizer."""

    held_integers: LazyTensor
    quantizer: Quantizer

    def to_argument(self) -> list[Any]:
        """Return the tensor as an encoded argument."""
        dtype, quantizer = DTYPES.index(self.dtype), self.quantizer
        if isinstance(quantizer, PerTensor):
            return [PER_TENSOR, dtype, quantizer.scale, quantizer.zero_point, self.held_integers]
        return [PER_CHANNEL, dtype, quantizer.axis, self.held_integers, quantizer.scales, quantizer.zero_points]

    def take_parts_of(self, other: Any) -> None:
        """Replace the parts of this tensor by those of `other`."""
        self.held_integers, self.quantizer = other.held_integers, other.quantizer

    def qscheme(self) -> torch.qscheme:
        """Return the quantization scheme. This method replaces the op, whose result PyTorch cannot convert to a QScheme."""
        return self.quantizer.scheme

    @for_users  # type: ignore[arg-type] # it is called `self` in no Protocol
    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        text = torch_layouts.format_whole(self.detach().cpu())
        before, mark, after = text.rpartition("size=(")
        return f"{before}device='{self.device}', {mark}{after}"

    @for_users
    def __reduce_ex__(self, protocol: Any) -> Any:
        local = self.detach().cpu()
        return torch_layouts.rebuild_from_cpu, (local, self.dtype, str(self.device), self.requires_grad)


def wrap_quantized(integers: LazyTensor, dtype: torch.dtype, quantizer: Quantizer) -> QuantizedTensor:
    """Return a quantized tensor with these parts, without checks."""
    tensor: QuantizedTensor = torch_dispatch.make_wrapper(
        QuantizedTensor, integers.shape, integers.stride(), integers.remote.meta.offset, dtype, integers.device
    )
    tensor.held_integers, tensor.quantizer = integers, quantizer
    return tensor
