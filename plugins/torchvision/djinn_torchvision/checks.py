"""Checks of arguments that torchvision's kernels do not check: indices of images, channels and elements, and sizes of gradients.

With invalid arguments, a kernel reads and writes beyond its tensors. Contents are checked on CPUs only, where a kernel could
read secrets of the executor's process. On a GPU, the check would wait for the device, whose memory holds values of one tenant
only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

Given = Mapping[str, Any]
Check = Callable[[Given], None]
_LARGEST: Final = 1 << 31  # elements of a tensor, because kernels count with 32 bits
_FARTHEST: Final = 1 << 20  # elements from the corner of an image, because kernels convert coordinates to integers
_MAX_SCALE: Final = 1 << 15  # finite in each dtype
_MAX_REGION: Final = 1 << 26  # elements, because kernels may sample each element of a region


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _same_dtype(arguments: Given, *names: str) -> None:
    dtypes = {arguments[name].dtype for name in names}
    floating = all(dtype.is_floating_point for dtype in dtypes)
    _require(len(dtypes) == 1 and floating, f"{', '.join(names)} must have one floating-point dtype")


def _require_range(name: str, tensor: torch.Tensor, minimum: int, stop: int) -> None:
    """Require that all elements are at least `minimum` and less than `stop`. Tensors on other devices than CPUs are not checked."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    fits = math.isfinite(low) and math.isfinite(high) and minimum <= low and high < stop
    _require(fits, f"{name} must be from {minimum} to {stop - 1}")


def _finite(name: str, tensor: torch.Tensor) -> None:
    """Require finite elements. Tensors on other devices than CPUs are not checked."""
    if tensor.device.type == "cpu":
        _require(bool(torch.isfinite(tensor).all()), f"{name} must be finite")


def _require_size(name: str, sizes: Sequence[int]) -> None:
    fits = all(0 <= size < _LARGEST for size in sizes) and math.prod(sizes) < _LARGEST
    _require(fits, f"{name} must have fewer than {_LARGEST} elements")


def _regions(arguments: Given, images: Sequence[int]) -> None:
    """Check the arguments of a pooling of regions. `images`: shape of the images."""
    rois = arguments["rois"]
    _require(rois.dim() == 2 and rois.shape[1] == 5, f"rois must have shape (K, 5), not {_shape(rois)}")
    _require_size("rois", rois.shape)
    _require_size("input", images)
    batch, _, *sides = images
    _require(not len(rois) or min(sides) > 0, "input must have pixels if rois has regions")
    _require_range("indices of images, in the first column of rois,", rois[:, 0], 0, batch)
    height, width, scale = arguments["pooled_height"], arguments["pooled_width"], arguments["spatial_scale"]
    _require(height > 0 and width > 0, "pooled_height and pooled_width must be positive")
    _require(abs(scale) < _MAX_SCALE, f"spatial_scale must be less than {_MAX_SCALE}")  # nan is not
    if "sampling_ratio" in arguments:
        _require(-1 <= arguments["sampling_ratio"] <= 1 << 10, "sampling_ratio must be at most 1024")
    if rois.device.type != "cpu" or not len(rois):
        return
    corners = rois[:, 1:].double() * scale
    limit = min(_FARTHEST, torch.finfo(rois.dtype).max / 4)  # kernels subtract and add corners in this dtype
    farthest = float(corners.abs().max())
    _require(farthest < limit, f"corners of rois times spatial_scale must be less than {limit}")  # nan is not
    width_of, height_of = (corners[:, 2 + axis] - corners[:, axis] for axis in (0, 1))
    area = float((width_of.clamp(min=1) * height_of.clamp(min=1)).max())
    _require(area < _MAX_REGION, f"regions of rois times spatial_scale must have fewer than {_MAX_REGION} elements")


def _nms(arguments: Given) -> None:
    boxes, scores = arguments["dets"], arguments["scores"]
    _same_dtype(arguments, "dets", "scores")
    _require(boxes.dim() == 2 and boxes.shape[1] == 4, f"boxes must have shape (N, 4), not {_shape(boxes)}")
    _require_size("boxes", boxes.shape)
    _require(_shape(scores) == (boxes.shape[0],), f"scores must have shape ({boxes.shape[0]},), not {_shape(scores)}")


def _forward(by_position: bool) -> Check:
    """Return the check for a pooling of regions. `by_position`: True if each part of a region has separate channels."""

    def check(arguments: Given) -> None:
        images = arguments["input"]
        _require(images.dim() == 4, "input must have 4 dimensions")
        _same_dtype(arguments, "input", "rois")
        _regions(arguments, images.shape)
        parts = arguments["pooled_height"] * arguments["pooled_width"]
        if by_position:
            _require(images.shape[1] % parts == 0, f"the channels of input must be a multiple of {parts}")
        channels = images.shape[1] // parts if by_position else images.shape[1]
        _require_size("the result", (arguments["rois"].shape[0], channels, parts))

    return check


def _backward(indices: str = "") -> Check:
    """Return the check for the gradient of a pooling of regions.

    `indices`: name of the argument with the input element or channel of each result, or empty if the op has none.
    """

    def check(arguments: Given) -> None:
        _same_dtype(arguments, "grad", "rois")
        grad, channels = arguments["grad"], arguments["channels"]
        _regions(arguments, (arguments["batch_size"], channels, arguments["height"], arguments["width"]))
        parts = arguments["pooled_height"] * arguments["pooled_width"]
        channel_count = channels // parts if indices == "channel_mapping" else channels
        expected_shape = (
            arguments["rois"].shape[0],
            channel_count,
            arguments["pooled_height"],
            arguments["pooled_width"],
        )
        _require_size("grad", expected_shape)
        _require(_shape(grad) == expected_shape, f"grad must have shape {expected_shape}, not {_shape(grad)}")
        if indices:
            index_tensor = arguments[indices]
            stop = channels if indices == "channel_mapping" else arguments["height"] * arguments["width"]
            _require(
                _shape(index_tensor) == expected_shape,
                f"{indices} must have shape {expected_shape}, not {_shape(index_tensor)}",
            )
            _require(index_tensor.dtype is torch.int32, f"{indices} must be int32")
            _require_range(indices, index_tensor, -1 if indices == "argmax" else 0, stop)

    return check


def _deform(arguments: Given) -> None:
    names = ("input", "weight", "offset", "bias", *(["mask"] if arguments["use_mask"] else []))
    _same_dtype(arguments, *names)
    images, weight, offset = arguments["input"], arguments["weight"], arguments["offset"]
    _require(images.dim() == weight.dim() == offset.dim() == 4, "input, weight and offset must have 4 dimensions")
    stride, padding, dilation = [
        (arguments[f"{name}_h"], arguments[f"{name}_w"]) for name in ("stride", "pad", "dilation")
    ]
    groups, parts = arguments["groups"], arguments["offset_groups"]
    _require(
        min(stride) > 0 and min(dilation) > 0 and min(padding) >= 0,
        "stride and dilation must be positive, and padding not negative",
    )
    _require(max(*stride, *dilation, *padding) < 1 << 20, "stride, dilation and padding must be less than 1048576")
    _require(groups > 0 and parts > 0, "groups and offset_groups must be positive")
    for name in names:
        _require_size(name, arguments[name].shape)
    batch, channels = images.shape[:2]
    channels_out, each, *kernel = weight.shape
    _require(min(kernel) > 0, "the kernel must have at least one element")
    _require(
        channels % groups == 0 and each == channels // groups and channels_out % groups == 0,
        "groups must divide the channels of input and weight, and weight must have the channels of one group",
    )
    _require(channels % parts == 0, "offset_groups must divide the channels of input")
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sides = zip(images.shape[2:], padding, spans, stride, strict=True)
    out = [(size + 2 * pad - span) // step + 1 for size, pad, span, step in sides]
    _require(min(out) > 0, "the kernel must not be larger than the padded input")
    cells = parts * kernel[0] * kernel[1]
    _require_size("the result or its columns", (batch, max(channels_out, channels * kernel[0] * kernel[1]), *out))
    _require(_shape(offset) == (batch, 2 * cells, *out), f"offset must have shape {(batch, 2 * cells, *out)}")
    _finite("offset", offset)
    if arguments["use_mask"]:
        _require(_shape(arguments["mask"]) == (batch, cells, *out), f"mask must have shape {(batch, cells, *out)}")
    _require(_shape(arguments["bias"]) == (channels_out,), f"bias must have shape ({channels_out},)")
    if "grad" in arguments:
        _same_dtype(arguments, "grad", "input")
        _require(
            _shape(arguments["grad"]) == (batch, channels_out, *out),
            f"grad must have shape {(batch, channels_out, *out)}",
        )


CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "torchvision::nms": _nms,
        "torchvision::roi_align": _forward(by_position=False),
        "torchvision::_roi_align_backward": _backward(),
        "torchvision::roi_pool": _forward(by_position=False),
        "torchvision::_roi_pool_backward": _backward("argmax"),
        "torchvision::ps_roi_align": _forward(by_position=True),
        "torchvision::_ps_roi_align_backward": _backward("channel_mapping"),
        "torchvision::ps_roi_pool": _forward(by_position=True),
        "torchvision::_ps_roi_pool_backward": _backward("channel_mapping"),
        "torchvision::deform_conv2d": _deform,
        "torchvision::_deform_conv2d_backward": _deform,
    }
)
