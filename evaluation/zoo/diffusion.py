"""Models of diffusers: denoisers and autoencoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evaluation.zoo.building import Inputs, architecture, numbers

LATENT = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
CROSS = {"cross_attention_dim": 16, "attention_head_dim": 4, "block_out_channels": (8, 16)}
DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")


def noisy(*shape: int) -> Inputs:
    """Return a latent at two timesteps."""
    return {"sample": numbers(*shape), "timestep": torch.tensor([3, 7])}


def told(*shape: int) -> Inputs:
    """Return a latent and its target."""
    return noisy(*shape) | {"encoder_hidden_states": numbers(2, 5, 16)}


@architecture("diffusion")
def unet_1d() -> tuple[nn.Module, Inputs]:
    """Return a planner over series."""
    from diffusers import UNet1DModel

    model = UNet1DModel(
        in_channels=4, out_channels=4, block_out_channels=(8, 8, 16, 16), time_embedding_type="positional", freq_shift=1.0,
        use_timestep_embedding=True, flip_sin_to_cos=False, out_block_type="OutConv1DBlock", act_fn="swish",
        mid_block_type="MidResTemporalBlock1D", down_block_types=("DownResnetBlock1D",) * 4,
        up_block_types=("UpResnetBlock1D",) * 3,
    )  # fmt: skip
    return model, noisy(2, 4, 16)


@architecture("diffusion")
def unet_2d() -> tuple[nn.Module, Inputs]:
    """Return DDPM."""
    from diffusers import UNet2DModel

    blocks: dict[str, Any] = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 4,
                              "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "block_out_channels": (8, 16)}  # fmt: skip
    return UNet2DModel(**LATENT, **blocks), noisy(2, 4, 8, 8)


@architecture("diffusion")
def unet_2d_condition() -> tuple[nn.Module, Inputs]:
    """Return Stable Diffusion."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(**LATENT, **CROSS, down_block_types=DOWN, up_block_types=UP), told(2, 4, 8, 8)


@architecture("diffusion")
def unet_sdxl() -> tuple[nn.Module, Inputs]:
    """Return Stable Diffusion XL, with sizes and a pooled text beside the timestep."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        **LATENT, **CROSS, down_block_types=DOWN, up_block_types=UP, addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=64, use_linear_projection=True,
    )  # fmt: skip
    conditions = {"text_embeds": numbers(2, 16), "time_ids": torch.arange(12.0).view(2, 6)}
    return model, told(2, 4, 8, 8) | {"added_cond_kwargs": conditions}


@architecture("diffusion")
def unet_3d_condition() -> tuple[nn.Module, Inputs]:
    """Return a video denoiser."""
    from diffusers import UNet3DConditionModel

    model = UNet3DConditionModel(
        **LATENT, cross_attention_dim=16, attention_head_dim=4, block_out_channels=(8, 16),
        down_block_types=("DownBlock3D", "CrossAttnDownBlock3D"), up_block_types=("CrossAttnUpBlock3D", "UpBlock3D"),
    )  # fmt: skip
    return model, told(2, 4, 2, 8, 8)


@architecture("diffusion")
def controlnet() -> tuple[nn.Module, Inputs]:
    """Return a ControlNet."""
    from diffusers import ControlNetModel

    model = ControlNetModel(
        in_channels=4, layers_per_block=1, norm_num_groups=4, **CROSS, down_block_types=DOWN,
        conditioning_embedding_out_channels=(8, 16),
    )  # fmt: skip
    return model, told(2, 4, 8, 8) | {"controlnet_cond": numbers(2, 3, 16, 16)}


@architecture("autoencoder")
def autoencoder_kl() -> tuple[nn.Module, Inputs]:
    """Return an image autoencoder (VAE)."""
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4, layers_per_block=1, sample_size=16,
    )  # fmt: skip
    return model, {"sample": numbers(2, 3, 16, 16)}


@architecture("autoencoder")
def autoencoder_tiny() -> tuple[nn.Module, Inputs]:
    """Return a VAE without attention and norms."""
    from diffusers import AutoencoderTiny

    sizes = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
             "num_decoder_blocks": (1, 1)}  # fmt: skip
    return AutoencoderTiny(**sizes), {"sample": numbers(2, 3, 16, 16)}


@architecture("autoencoder")
def vq_model() -> tuple[nn.Module, Inputs]:
    """Return a VQ model."""
    from diffusers import VQModel

    model = VQModel(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4, layers_per_block=1, sample_size=16, num_vq_embeddings=16,
    )  # fmt: skip
    return model, {"sample": numbers(2, 3, 16, 16)}


@architecture("diffusion transformer")
def dit() -> tuple[nn.Module, Inputs]:
    """Return DiT: classes and timesteps modulate the norms."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    return model, {
        "hidden_states": numbers(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 2]),
    }


@architecture("diffusion transformer")
def pixart() -> tuple[nn.Module, Inputs]:
    """Return PixArt."""
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2,
        cross_attention_dim=16, caption_channels=16, use_additional_conditions=False, norm_num_groups=4,
    )  # fmt: skip
    inputs = told(2, 4, 8, 8)
    inputs["hidden_states"] = inputs.pop("sample")
    return model, inputs | {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


@architecture("diffusion transformer")
def sd3() -> tuple[nn.Module, Inputs]:
    """Return Stable Diffusion 3: joint attention of images and text."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=12, pos_embed_max_size=8,
    )  # fmt: skip
    inputs = told(2, 4, 8, 8)
    inputs["hidden_states"] = inputs.pop("sample")
    return model, inputs | {"pooled_projections": numbers(2, 12)}


@architecture("diffusion transformer")
def flux() -> tuple[nn.Module, Inputs]:
    """Return FLUX."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=12, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    places = torch.stack([torch.zeros(16), *torch.unravel_index(torch.arange(16), (4, 4))], dim=-1)
    return model, {
        "hidden_states": numbers(2, 16, 4), "encoder_hidden_states": numbers(2, 5, 16), "pooled_projections": numbers(2, 12),
        "timestep": torch.tensor([0.3, 0.7]), "img_ids": places, "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip


@architecture("diffusion transformer")
def aura_flow() -> tuple[nn.Module, Inputs]:
    """Return AuraFlow."""
    from diffusers import AuraFlowTransformer2DModel

    model = AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
        attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, pos_embed_max_size=16,
    )  # fmt: skip
    inputs = told(2, 4, 8, 8)
    return model, {"hidden_states": inputs["sample"], "encoder_hidden_states": inputs["encoder_hidden_states"],
                   "timestep": torch.tensor([0.3, 0.7])}  # fmt: skip


@architecture("diffusion transformer")
def cog_video() -> tuple[nn.Module, Inputs]:
    """Return CogVideoX."""
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=16,
        num_layers=1, sample_width=8, sample_height=8, sample_frames=5, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=5,
    )  # fmt: skip
    return model, {"hidden_states": numbers(2, 2, 4, 8, 8), "encoder_hidden_states": numbers(2, 5, 16),
                   "timestep": torch.tensor([3, 7])}  # fmt: skip


@architecture("diffusion transformer")
def prior() -> tuple[nn.Module, Inputs]:
    """Return a prior, which predicts CLIP's image embedding from the text embedding."""
    from diffusers import PriorTransformer

    model = PriorTransformer(num_attention_heads=2, attention_head_dim=4, num_layers=2, embedding_dim=8, num_embeddings=5,
                             additional_embeddings=4)  # fmt: skip
    return model, {"hidden_states": numbers(2, 8), "timestep": torch.tensor([3, 7]), "proj_embedding": numbers(2, 8),
                   "encoder_hidden_states": numbers(2, 5, 8), "attention_mask": torch.ones(2, 5)}  # fmt: skip
