"""The operator library of torchvision; what needs torchvision's C++ ops is skipped without them."""

from __future__ import annotations

import math

import pytest
import torch

import djinn_torchvision
from djinn.testing import OperatorLibraryConformance, PluginConformance
from djinn_torchvision.checks import CHECKS


def missing_ops_reason():
    """Return why torchvision's C++ ops are missing, or an empty string.

    A wheel for another PyTorch version cannot be imported.
    """
    try:
        import torchvision
    except Exception as error:  # whatever a broken installation raises
        return f"torchvision cannot be imported: {error!r}"
    return "" if torchvision.extension._has_ops() else "this torchvision has no C++ ops"


MISSING = missing_ops_reason()
with_ops = pytest.mark.skipif(bool(MISSING), reason=MISSING)


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_torchvision


ROIS = torch.tensor([[0.0, 1.0, 1.0, 6.0, 6.0], [1.0, 0.0, 2.0, 5.0, 7.0]])
POOLED = (1.0, 2, 2)
SIZES = (2, 8, 8, 8)


def example_calls():
    images, boxes = torch.randn(SIZES), torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2.1], [4, 4, 6, 6]])
    weight, offset = torch.randn(3, 4, 3, 3), torch.randn(2, 2 * 2 * 9, 6, 6)
    mask, bias = torch.rand(2, 2 * 9, 6, 6), torch.randn(3)
    convolved = (torch.randn(2, 4, 8, 8), weight, offset, mask, bias)
    geometry = (1, 1, 0, 0, 1, 1, 1, 2, True)
    whole, part = torch.randn(2, 8, 2, 2), torch.randn(2, 2, 2, 2)
    ranks, mapping = torch.zeros(2, 8, 2, 2, dtype=torch.int32), torch.zeros(2, 2, 2, 2, dtype=torch.int32)
    return {
        "nms": (boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5),
        "roi_align": (images, ROIS, *POOLED, 2, False),
        "_roi_align_backward": (whole, ROIS, *POOLED, *SIZES, 2, False),
        "roi_pool": (images, ROIS, *POOLED),
        "_roi_pool_backward": (whole, ROIS, ranks, *POOLED, *SIZES),
        "ps_roi_align": (images, ROIS, *POOLED, 2),
        "_ps_roi_align_backward": (part, ROIS, mapping, *POOLED, 2, *SIZES),
        "ps_roi_pool": (images, ROIS, *POOLED),
        "_ps_roi_pool_backward": (part, ROIS, mapping, *POOLED, *SIZES),
        "deform_conv2d": (*convolved, *geometry),
        "_deform_conv2d_backward": (torch.randn(2, 3, 6, 6), *convolved, *geometry),
    }


@with_ops
class TestLibrary(OperatorLibraryConformance):
    @pytest.fixture
    def library(self):
        return djinn_torchvision.Torchvision()

    @pytest.fixture
    def calls(self):
        return {f"torchvision::{name}": [call_arguments] for name, call_arguments in example_calls().items()}


REGION = "spatial_scale pooled_height pooled_width".split()
IMAGE = "batch_size channels height width".split()
GEOMETRY = "stride_h stride_w pad_h pad_w dilation_h dilation_w groups offset_groups use_mask".split()
NAMES = {
    "nms": "dets scores iou_threshold".split(),
    "roi_align": ["input", "rois", *REGION, "sampling_ratio", "aligned"],
    "_roi_align_backward": ["grad", "rois", *REGION, *IMAGE, "sampling_ratio", "aligned"],
    "roi_pool": ["input", "rois", *REGION],
    "_roi_pool_backward": ["grad", "rois", "argmax", *REGION, *IMAGE],
    "ps_roi_align": ["input", "rois", *REGION, "sampling_ratio"],
    "_ps_roi_align_backward": ["grad", "rois", "channel_mapping", *REGION, "sampling_ratio", *IMAGE],
    "ps_roi_pool": ["input", "rois", *REGION],
    "_ps_roi_pool_backward": ["grad", "rois", "channel_mapping", *REGION, *IMAGE],
    "deform_conv2d": ["input", "weight", "offset", "mask", "bias", *GEOMETRY],
    "_deform_conv2d_backward": ["grad", "input", "weight", "offset", "mask", "bias", *GEOMETRY],
}


def call_arguments(name, **changes):
    return dict(zip(NAMES[name], example_calls()[name], strict=True)) | changes


@with_ops
@pytest.mark.parametrize("name", NAMES)
def test_argument_names_match_torchvision(name):
    schema = getattr(torch.ops.torchvision, name).default._schema
    assert [argument.name for argument in schema.arguments] == NAMES[name]


@pytest.mark.parametrize("name", NAMES)
def test_valid_arguments_are_accepted(name):
    CHECKS[f"torchvision::{name}"](call_arguments(name))


def regions(image, *corners):
    return torch.tensor([[image, *corners]] * 2)


BAD_REGIONS = {
    "an image that does not exist": regions(2.0, 0.0, 0.0, 1.0, 1.0),
    "an image before the first": regions(-1.0, 0.0, 0.0, 1.0, 1.0),
    "no number": regions(math.nan, 0.0, 0.0, 1.0, 1.0),
    "corners without a number": regions(0.0, math.nan, 0.0, 1.0, 1.0),
    "corners far away": regions(0.0, 0.0, 0.0, math.inf, 1.0),
    "a huge region": regions(0.0, 0.0, 0.0, 1e5, 1e5),
    "four columns": torch.zeros(2, 4),
    "another dtype": regions(0.0, 0.0, 0.0, 1.0, 1.0).double(),
}


POOLINGS = [name for name in NAMES if "roi" in name]


@pytest.mark.parametrize("rois", BAD_REGIONS.values(), ids=list(BAD_REGIONS))
@pytest.mark.parametrize("name", POOLINGS)
def test_regions_beyond_an_image_are_refused(name, rois):
    with pytest.raises(ValueError):
        CHECKS[f"torchvision::{name}"](call_arguments(name, rois=rois))


@pytest.mark.parametrize("side", ["height", "width"])
@pytest.mark.parametrize("name", POOLINGS)
def test_regions_of_an_image_without_pixels_are_refused(name, side):
    size = [2, 8, 8, 8]
    size[2 if side == "height" else 3] = 0
    changes = {side: 0} if name.startswith("_") else {"input": torch.ones(size)}
    with pytest.raises(ValueError, match="must have pixels"):
        CHECKS[f"torchvision::{name}"](call_arguments(name, **changes))


@pytest.mark.parametrize("name", ["roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"])
def test_empty_regions_of_empty_image_are_accepted(name):
    CHECKS[f"torchvision::{name}"](call_arguments(name, input=torch.ones(2, 8, 0, 8), rois=torch.ones(0, 5)))


@pytest.mark.parametrize("scale", [-1e300, 1e39, 1e5, math.nan])
@pytest.mark.parametrize("name", POOLINGS)
def test_infinite_scale_is_refused(name, scale):
    """The scale is infinite in float32 or float16. Its product with a corner at 0 is NaN."""
    with pytest.raises(ValueError, match="spatial_scale must be"):
        CHECKS[f"torchvision::{name}"](call_arguments(name, spatial_scale=scale, rois=torch.zeros(2, 5)))


def test_infinite_float16_corners_are_refused():
    rois = torch.tensor([[0.0, 30000.0, 0.0, 30000.0, 1.0]]).half()
    changes = {"input": torch.ones(2, 8, 8, 8).half(), "rois": rois, "spatial_scale": 4.0}
    with pytest.raises(ValueError, match="corners of rois"):
        CHECKS["torchvision::roi_align"](call_arguments("roi_align", **changes))


def meta_tensor(*shape):
    """Return a tensor without memory."""
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("roi_align", {"input": meta_tensor(2, 8, 1 << 15, 1 << 15)}),
        ("ps_roi_pool", {"input": meta_tensor(1 << 20, 1 << 12, 1, 1)}),
        ("_roi_align_backward", {"rois": meta_tensor(1 << 29, 5)}),
        ("roi_pool", {"input": meta_tensor(2, 0, 8, 8), "rois": meta_tensor(1 << 29, 5)}),
        ("deform_conv2d", {"input": meta_tensor(1 << 20, 4, 1 << 10, 8)}),
        ("nms", {"dets": meta_tensor(1 << 29, 4), "scores": meta_tensor(1 << 29)}),
    ],
)
def test_too_many_elements_are_refused(name, changes):
    with pytest.raises(ValueError, match=r"must have fewer than \d+ elements"):
        CHECKS[f"torchvision::{name}"](call_arguments(name, **changes))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["deform_conv2d", "_deform_conv2d_backward"])
def test_non_finite_offset_is_refused(name, wrong):
    (offset := torch.zeros(2, 36, 6, 6))[1, 35, 5, 5] = wrong
    with pytest.raises(ValueError, match="offset must be finite"):
        CHECKS[f"torchvision::{name}"](call_arguments(name, offset=offset))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("nms", {"scores": torch.ones(2)}),
        ("nms", {"dets": torch.ones(3, 5)}),
        ("roi_align", {"sampling_ratio": 1 << 20}),
        ("roi_align", {"pooled_height": 0}),
        ("roi_align", {"pooled_height": 1 << 20, "pooled_width": 1 << 20}),
        ("ps_roi_align", {"pooled_height": 3}),
        ("_roi_align_backward", {"height": -1}),
        ("_roi_align_backward", {"grad": torch.ones(2, 8, 2, 1)}),
        ("_roi_align_backward", {"channels": 1 << 30}),
        ("_roi_pool_backward", {"argmax": torch.full((2, 8, 2, 2), 64, dtype=torch.int32)}),
        ("_roi_pool_backward", {"argmax": torch.zeros(2, 8, 2, 2)}),
        ("_roi_pool_backward", {"height": 2, "argmax": torch.full((2, 8, 2, 2), 60, dtype=torch.int32)}),
        ("_ps_roi_align_backward", {"channel_mapping": torch.full((2, 2, 2, 2), 8, dtype=torch.int32)}),
        ("_ps_roi_pool_backward", {"channel_mapping": torch.full((2, 2, 2, 2), -1, dtype=torch.int32)}),
        ("deform_conv2d", {"offset": torch.ones(2, 36, 6, 5)}),
        ("deform_conv2d", {"mask": torch.ones(1, 1)}),
        ("deform_conv2d", {"bias": torch.ones(2)}),
        ("deform_conv2d", {"stride_h": 0}),
        ("deform_conv2d", {"groups": 0}),
        ("deform_conv2d", {"weight": torch.ones(3, 2, 3, 3)}),
        ("_deform_conv2d_backward", {"grad": torch.ones(2, 3, 6, 7)}),
    ],
)  # fmt: skip
def test_unchecked_kernel_arguments_are_checked(name, changes):
    with pytest.raises(ValueError):
        CHECKS[f"torchvision::{name}"](call_arguments(name, **changes))
