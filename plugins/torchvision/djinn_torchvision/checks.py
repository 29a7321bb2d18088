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
_LARGEST_SCALE: Final = 1 << 15  # finite in each dtype
_LARGEST_REGION: Final = 1 << 26  # elements, because kernels may sample each element of a region


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _same_dtype(given: Given, *names: str) -> None:
    dtypes = {given[name].dtype for name in names}
    floating = all(dtype.is_floating_point for dtype in dtypes)
    _require(len(dtypes) == 1 and floating, f"{', '.join(names)} must have one floating-point dtype")


def _within(name: str, tensor: torch.Tensor, least: int, stop: int) -> None:
    """Require that all elements are at least `least` and less than `stop`. Tensors on other devices than CPUs are not checked."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    fits = math.isfinite(low) and math.isfinite(high) and least <= low and high < stop
    _require(fits, f"{name} must be from {least} to {stop - 1}")


def _finite(name: str, tensor: torch.Tensor) -> None:
    """Require finite elements. Tensors on other devices than CPUs are not checked."""
    if tensor.device.type == "cpu":
        _require(bool(torch.isfinite(tensor).all()), f"{name} must be finite")


def _bounded(what: str, sizes: Sequence[int]) -> None:
    fits = all(0 <= size < _LARGEST for size in sizes) and math.prod(sizes) < _LARGEST
    _require(fits, f"{what} must have fewer than {_LARGEST} elements")


def _regions(given: Given, images: Sequence[int]) -> None:
    """Check the arguments of a pooling of regions. `images`: shape of the images."""
    rois = given["rois"]
    _require(rois.dim() == 2 and rois.shape[1] == 5, f"rois must have shape (K, 5), not {_shape(rois)}")
    _bounded("rois", rois.shape)
    _bounded("input", images)
    batch, _, *sides = images
    _require(not len(rois) or min(sides) > 0, "input must have pixels if rois has regions")
    _within("indices of images, in the first column of rois,", rois[:, 0], 0, batch)
    height, width, scale = given["pooled_height"], given["pooled_width"], given["spatial_scale"]
    _require(height > 0 and width > 0, "pooled_height and pooled_width must be positive")
    _require(abs(scale) < _LARGEST_SCALE, f"spatial_scale must be less than {_LARGEST_SCALE}")  # nan is not
    if "sampling_ratio" in given:
        _require(-1 <= given["sampling_ratio"] <= 1 << 10, "sampling_ratio must be at most 1024")
    if rois.device.type != "cpu" or not len(rois):
        return
    corners = rois[:, 1:].double() * scale
    limit = min(_FARTHEST, torch.finfo(rois.dtype).max / 4)  # kernels subtract and add corners in this dtype
    farthest = float(corners.abs().max())
    _require(farthest < limit, f"corners of rois times spatial_scale must be less than {limit}")  # nan is not
    width_of, height_of = (corners[:, 2 + axis] - corners[:, axis] for axis in (0, 1))
    area = float((width_of.clamp(min=1) * height_of.clamp(min=1)).max())
    _require(
        area < _LARGEST_REGION, f"regions of rois times spatial_scale must have fewer than {_LARGEST_REGION} elements"
    )


def _nms(given: Given) -> None:
    boxes, scores = given["dets"], given["scores"]
    _same_dtype(given, "dets", "scores")
    _require(boxes.dim() == 2 and boxes.shape[1] == 4, f"boxes must have shape (N, 4), not {_shape(boxes)}")
    _bounded("boxes", boxes.shape)
    _require(_shape(scores) == (boxes.shape[0],), f"scores must have shape ({boxes.shape[0]},), not {_shape(scores)}")


def _forward(by_position: bool) -> Check:
    """Return the check for a pooling of regions. `by_position`: True if each part of a region has separate channels."""

    def check(given: Given) -> None:
        images = given["input"]
        _require(images.dim() == 4, "input must have 4 dimensions")
        _same_dtype(given, "input", "rois")
        _regions(given, images.shape)
        parts = given["pooled_height"] * given["pooled_width"]
        if by_position:
            _require(images.shape[1] % parts == 0, f"the channels of input must be a multiple of {parts}")
        channels = images.shape[1] // parts if by_position else images.shape[1]
        _bounded("the result", (given["rois"].shape[0], channels, parts))

    return check


def _backward(indices: str = "") -> Check:
    """Return the check for the gradient of a pooling of regions.

    `indices`: name of the argument with the input element or channel of each result, or empty if the op has none.
    """

    def check(given: Given) -> None:
        _same_dtype(given, "grad", "rois")
        grad, channels = given["grad"], given["channels"]
        _regions(given, (given["batch_size"], channels, given["height"], given["width"]))
        parts = given["pooled_height"] * given["pooled_width"]
        channel_count = channels // parts if indices == "channel_mapping" else channels
        expected_shape = (given["rois"].shape[0], channel_count, given["pooled_height"], given["pooled_width"])
        _bounded("grad", expected_shape)
        _require(_shape(grad) == expected_shape, f"grad must have shape {expected_shape}, not {_shape(grad)}")
        if indices:
            index_tensor = given[indices]
            stop = channels if indices == "channel_mapping" else given["height"] * given["width"]
            _require(
                _shape(index_tensor) == expected_shape,
                f"{indices} must have shape {expected_shape}, not {_shape(index_tensor)}",
            )
            _require(index_tensor.dtype is torch.int32, f"{indices} must be int32")
            _within(indices, index_tensor, -1 if indices == "argmax" else 0, stop)

    return check


def _deform(given: Given) -> None:
    names = ("input", "weight", "offset", "bias", *(["mask"] if given["use_mask"] else []))
    _same_dtype(given, *names)
    images, weight, offset = given["input"], given["weight"], given["offset"]
    _require(images.dim() == weight.dim() == offset.dim() == 4, "input, weight and offset must have 4 dimensions")
    stride, padding, dilation = [(given[f"{name}_h"], given[f"{name}_w"]) for name in ("stride", "pad", "dilation")]
    groups, parts = given["groups"], given["offset_groups"]
    _require(
        min(stride) > 0 and min(dilation) > 0 and min(padding) >= 0,
        "stride and dilation must be positive, and padding not negative",
    )
    _require(max(*stride, *dilation, *padding) < 1 << 20, "stride, dilation and padding must be less than 1048576")
    _require(groups > 0 and parts > 0, "groups and offset_groups must be positive")
    for name in names:
        _bounded(name, given[name].shape)
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
    _bounded("the result or its columns", (batch, max(channels_out, channels * kernel[0] * kernel[1]), *out))
    _require(_shape(offset) == (batch, 2 * cells, *out), f"offset must have shape {(batch, 2 * cells, *out)}")
    _finite("offset", offset)
    if given["use_mask"]:
        _require(_shape(given["mask"]) == (batch, cells, *out), f"mask must have shape {(batch, cells, *out)}")
    _require(_shape(given["bias"]) == (channels_out,), f"bias must have shape ({channels_out},)")
    if "grad" in given:
        _same_dtype(given, "grad", "input")
        _require(
            _shape(given["grad"]) == (batch, channels_out, *out), f"grad must have shape {(batch, channels_out, *out)}"
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
