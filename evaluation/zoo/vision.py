"""Models of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evaluation.zoo.building import SIZES, VISION, Inputs, architecture, labelled_image, numbers, pretrained, row

STAGES = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4}


def classifier(module: str, prefix: str, head: str = "ForImageClassification", **settings: Any) -> None:
    """Add an image classifier."""
    row("vision", module, prefix, head, labelled_image, **(settings | {"num_labels": 5}))


def pixels(*shape: int) -> Inputs:
    """Return images alone."""
    return {"pixel_values": numbers(*shape)}


classifier("vit", "ViT", **VISION)
classifier("deit", "DeiT", **VISION)
classifier("beit", "Beit", **VISION, use_relative_position_bias=True)
classifier("dinov2", "Dinov2", **VISION)
classifier("dinov2_with_registers", "Dinov2WithRegisters", **VISION)
classifier("ijepa", "IJepa", **VISION)
classifier("hiera", "Hiera", embed_dim=16, image_size=[32, 32], patch_stride=[4, 4], patch_padding=[1, 1], patch_size=[4, 4],
           depths=[1, 1], num_heads=[2, 4], query_stride=[2, 2], masked_unit_size=[2, 2], num_query_pool=1)  # fmt: skip
classifier("swin", "Swin", **STAGES)
classifier("swinv2", "Swinv2", **STAGES)
classifier("convnext", "ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32)
classifier("convnextv2", "ConvNextV2", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32)
classifier("resnet", "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
classifier("regnet", "RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=8)
classifier("bit", "Bit", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=2)
classifier("segformer", "Segformer", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32],
           patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2])  # fmt: skip
classifier("pvt", "Pvt", image_size=32, num_encoder_blocks=2, depths=[1, 1], sequence_reduction_ratios=[2, 1],
           hidden_sizes=[16, 32], patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2])  # fmt: skip
classifier("mobilenet_v1", "MobileNetV1", image_size=32, depth_multiplier=0.25)
classifier("mobilenet_v2", "MobileNetV2", image_size=32, depth_multiplier=0.25)
classifier("mobilevit", "MobileViT", image_size=32, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
           num_attention_heads=4)  # fmt: skip
classifier("efficientnet", "EfficientNet", image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320)
classifier("levit", "Levit", image_size=32, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1],
           key_dim=[8, 8, 8])  # fmt: skip
classifier("focalnet", "FocalNet", image_size=32, embed_dim=16, depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3],
           hidden_sizes=[16, 32])  # fmt: skip
classifier("poolformer", "PoolFormer", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])
classifier("swiftformer", "SwiftFormer", image_size=32, depths=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32])
row("vision", "vit_mae", "ViTMAE", "ForPreTraining", lambda: pixels(2, 3, 32, 32) | {"noise": numbers(2, 16)}, **VISION,
    decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32)  # fmt: skip
row("vision", "dpt", "DPT", "ForDepthEstimation", lambda: pixels(2, 3, 32, 32), **(VISION | {"num_hidden_layers": 4}),
    backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8)  # fmt: skip
row("vision", "swin2sr", "Swin2SR", "ForImageSuperResolution", lambda: pixels(1, 3, 16, 16), image_size=16, embed_dim=16,
    depths=[1, 1], num_heads=[2, 2], window_size=4)  # fmt: skip
row("vision", "superpoint", "SuperPoint", "ForKeypointDetection", lambda: pixels(1, 3, 32, 32),
    encoder_hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, keypoint_decoder_dim=65, descriptor_decoder_dim=16)  # fmt: skip
row("vision", "vitpose_backbone", "VitPoseBackbone", "", lambda: pixels(2, 3, 32, 32) | {"dataset_index": None},
    **(VISION | {"image_size": [32, 32], "patch_size": [8, 8]}))  # fmt: skip
row("vision", "imagegpt", "ImageGPT", "ForCausalImageModeling", lambda: {"input_ids": torch.arange(20).view(2, 10)},
    vocab_size=99, n_positions=16, n_embd=32, n_layer=2, n_head=4)  # fmt: skip
row("vision", "yolos", "Yolos", "ForObjectDetection", lambda: pixels(2, 3, 32, 32),
    **(VISION | {"image_size": [32, 32]}), num_detection_tokens=5, num_labels=5)  # fmt: skip


def boxes() -> list[Inputs]:
    """Return labels of two images: classes and boxes of their objects."""
    return [
        {"class_labels": torch.tensor([1, 2]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.2, 0.3, 0.1, 0.1]])},
        {"class_labels": torch.tensor([0]), "boxes": torch.tensor([[0.4, 0.6, 0.3, 0.3]])},
    ]


@architecture("vision")
def detr() -> tuple[nn.Module, Inputs]:
    """Return DETR. Matching of predictions runs on the CPU, as in the library."""
    from transformers import ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    model = pretrained(
        "detr", "DetrForObjectDetection", "DetrConfig", use_timm_backbone=False, backbone_config=backbone, d_model=32,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_queries=5, num_labels=3,
    )  # fmt: skip
    return model, pixels(2, 3, 64, 64) | {"labels": boxes()}


@architecture("vision")
def sam() -> tuple[nn.Module, Inputs]:
    """Return SAM: segmentation by a point."""
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 64, "output_channels": 16,
             "image_size": 32, "patch_size": 8, "window_size": 2, "global_attn_indexes": [1],
             "num_pos_feats": 8}  # fmt: skip
    model = pretrained(
        "sam", "SamModel", "SamConfig", vision_config=tower,
        prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 16, "num_attention_heads": 2, "mlp_dim": 32, "iou_head_hidden_dim": 16,
                             "num_hidden_layers": 1},
    )  # fmt: skip
    return model, pixels(1, 3, 32, 32) | {"input_points": torch.tensor([[[[8.0, 12.0]]]])}


@architecture("vision")
def depth_anything() -> tuple[nn.Module, Inputs]:
    """Return a depth estimator."""
    from transformers import Dinov2Config

    backbone = Dinov2Config(**(SIZES | {"image_size": 28, "patch_size": 14, "num_hidden_layers": 4}), out_features=["stage1", "stage2", "stage3", "stage4"],
                            reshape_hidden_states=False)  # fmt: skip
    model = pretrained(
        "depth_anything", "DepthAnythingForDepthEstimation", "DepthAnythingConfig", backbone_config=backbone,
        reassemble_hidden_size=32, patch_size=14, neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8, head_hidden_size=8,
    )  # fmt: skip
    return model, pixels(1, 3, 28, 28)


@architecture("vision")
def upernet() -> tuple[nn.Module, Inputs]:
    """Return a segmentation model."""
    from transformers import ConvNextConfig

    backbone = ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
                              out_features=["stage1", "stage2", "stage3", "stage4"])  # fmt: skip
    model = pretrained("upernet", "UperNetForSemanticSegmentation", "UperNetConfig", backbone_config=backbone, hidden_size=16,
                       use_auxiliary_head=True, auxiliary_in_channels=16, auxiliary_channels=8, num_labels=5,
                       pool_scales=[1, 2])  # fmt: skip
    return model, pixels(2, 3, 64, 64) | {"labels": torch.arange(2 * 64 * 64).view(2, 64, 64) % 5}
