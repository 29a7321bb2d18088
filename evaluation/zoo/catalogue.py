"""All architectures of the zoo, and a few representatives for the default suite."""

from __future__ import annotations

from evaluation.zoo import audio, decoders, diffusion, encoders, multimodal, series, vision
from evaluation.zoo.building import ZOO

__all__ = ["SHORT_FORM", "ZOO", "audio", "decoders", "diffusion", "encoders", "multimodal", "series", "vision"]

# one of each structure; sizes do not matter
SHORT_FORM = (
    "gpt2", "llama", "qwen3_moe", "mamba2", "bert", "t5", "swin", "resnet", "wav2vec2", "clip", "unet_2d_condition",
    "packed_lstm",
)  # fmt: skip
