"""A small pipeline of diffusers with random weights."""

from __future__ import annotations

import functools

import torch


@functools.cache
def stable_diffusion():
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate("[PAD] [BOS] [EOS] a cat on mat".split())}, "[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[PAD]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=8, **special)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"vocab_size": 10, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    text = CLIPTextModel(CLIPTextConfig(**sizes, **tokens)).eval()
    blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
    ends = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(latent_channels=4, sample_size=16, **ends, **blocks).eval()
    ends = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    unet = UNet2DConditionModel(8, cross_attention_dim=16, attention_head_dim=4, **ends, **blocks).eval()
    rest = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipeline = StableDiffusionPipeline(vae, text, tokenizer, unet, EulerDiscreteScheduler(steps_offset=1), **rest)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
