"""Detection models of torchvision: small ones with random weights, for two images of different sizes with three objects
each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision.models import detection
from torchvision.models.detection.backbone_utils import mobilenet_backbone

from evaluation.zoo.building import Architecture, Inputs, numbers

SIZES = ((70, 96), (64, 80))
BOXES = torch.tensor([[4, 4, 40, 36], [20, 10, 60, 50], [30, 30, 62, 60]])
LABELS = torch.tensor([1, 2, 4])
SMALL = {"num_classes": 5, "min_size": 64, "max_size": 96}


class Detector(nn.Module):
    """A detection model with the sum of its losses as `loss`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> Any:
        if not self.training:
            return self.model(images)
        losses = self.model(images, targets)
        return losses | {"loss": sum(losses.values())}


def backbone() -> nn.Module:
    return mobilenet_backbone(backbone_name="mobilenet_v3_large", weights=None, fpn=True, norm_layer=nn.BatchNorm2d)


def anchors(*sizes: tuple[float, ...]) -> detection.anchor_utils.AnchorGenerator:
    """Return anchors of these sizes for each feature map of `backbone`."""
    return detection.anchor_utils.AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))


def faster_rcnn() -> nn.Module:
    return detection.FasterRCNN(
        backbone(), **SMALL, rpn_anchor_generator=anchors((16,), (32,), (64,)), box_score_thresh=0.0
    )


def mask_rcnn() -> nn.Module:
    return detection.MaskRCNN(
        backbone(), **SMALL, rpn_anchor_generator=anchors((16,), (32,), (64,)), box_score_thresh=0.0
    )


def retinanet() -> nn.Module:
    generator = anchors((16, 24), (32, 48), (64, 96))
    return detection.RetinaNet(backbone(), **SMALL, anchor_generator=generator, score_thresh=0.0)


def ssd() -> nn.Module:
    make = detection.ssdlite320_mobilenet_v3_large
    # With more candidates, torchvision's CPU code removes boxes class by class, which orders equal scores differently.
    return make(weights=None, weights_backbone=None, num_classes=5, score_thresh=0.0, topk_candidates=200)


def inputs() -> Inputs:
    images = [numbers(3, *size, seed=seed).sigmoid() for seed, size in enumerate(SIZES)]
    return {
        "images": images,
        "targets": [{"boxes": BOXES.float(), "labels": LABELS, "masks": masks(*size)} for size in SIZES],
    }


def masks(height: int, width: int) -> torch.Tensor:
    """Return the boxes as masks."""
    output = torch.zeros(len(BOXES), height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(output, BOXES.tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    return output


def _architecture(make: Callable[[], nn.Module]) -> Architecture:
    return Architecture(make.__name__, "detection", lambda: (Detector(make()), inputs()))


DETECTORS = {make.__name__: _architecture(make) for make in (faster_rcnn, mask_rcnn, retinanet, ssd)}
