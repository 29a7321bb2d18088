"""Models of transformers and diffusers that the classifier was not developed on: the larger half of the part `blind`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from evaluation.semantics.plain_models import PLAIN
from evaluation.zoo import building
from evaluation.zoo.audio import WAVES, heard
from evaluation.zoo.building import (
    SIZES,
    TEXT,
    VISION,
    Architecture,
    Inputs,
    labelled_image,
    numbers,
    padded_text,
    text,
    words,
)
from evaluation.zoo.decoders import EXPERTS, GROUPED
from evaluation.zoo.diffusion import told
from evaluation.zoo.encoders import T5, TRANSLATOR
from evaluation.zoo.multimodal import LANGUAGE, PICTURE, TOWER, illustrated, pair

__all__ = ["PLAIN"]


def model(name: str, prefix: str, head: str, inputs: Callable[[], Inputs], **settings: Any) -> None:
    """Add an entry of transformers, by the names of its classes."""

    def make() -> tuple[nn.Module, Inputs]:
        return building.pretrained(name, f"{prefix}{head}", f"{prefix}Config", **settings), inputs()

    PLAIN[name] = Architecture(name, "blind", make)


def diffused(name: str, kind: str, inputs: Callable[[], Inputs], **settings: Any) -> None:
    """Add an entry of diffusers."""

    def make() -> tuple[nn.Module, Inputs]:
        import diffusers

        return getattr(diffusers, kind)(**settings), inputs()

    PLAIN[name] = Architecture(name, "blind", make)


DECODER = TEXT | GROUPED
for _name, _prefix, _more in (
    ("olmo3", "Olmo3", {"sliding_window": 4}),
    ("exaone4", "Exaone4", {"sliding_window": 4}),
    ("seed_oss", "SeedOss", {"head_dim": 8}),
    ("arcee", "Arcee", {}),
    ("helium", "Helium", {"head_dim": 8}),
    ("apertus", "Apertus", {}),
    ("diffllama", "DiffLlama", {}),
    ("ernie4_5", "Ernie4_5", {"head_dim": 8}),
    ("hunyuan_v1_dense", "HunYuanDenseV1", {"head_dim": 8}),
):
    model(_name, _prefix, "ForCausalLM", text, **(DECODER | _more))
ROUTED = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
model("dots1", "Dots1", "ForCausalLM", text, **(TEXT | ROUTED), head_dim=8)
model("glm4_moe", "Glm4Moe", "ForCausalLM", text, **(TEXT | ROUTED), head_dim=8)
model("granitemoeshared", "GraniteMoeShared", "ForCausalLM", text, **DECODER, num_local_experts=4, num_experts_per_tok=2,
      shared_intermediate_size=32)  # fmt: skip
model("openai", "OpenAIGPT", "LMHeadModel", text, vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=32)
model("gpt_neox_japanese", "GPTNeoXJapanese", "ForCausalLM", text, **TEXT, intermediate_multiple_size=2)

for _name, _prefix, _more in (
    ("megatron_bert", "MegatronBert", {}),
    ("roberta_prelayernorm", "RobertaPreLayerNorm", {"max_position_embeddings": 40}),
    ("eurobert", "EuroBert", GROUPED | {"mask_token_id": 3}),
    ("big_bird", "BigBird", {"attention_type": "original_full"}),
    ("camembert", "Camembert", {"max_position_embeddings": 40}),
):
    model(_name, _prefix, "ForMaskedLM", padded_text, **(TEXT | _more))

model("blenderbot_small", "BlenderbotSmall", "ForConditionalGeneration", padded_text, **TRANSLATOR)
model("mvp", "Mvp", "ForConditionalGeneration", padded_text, **TRANSLATOR)
model("longt5", "LongT5", "ForConditionalGeneration", padded_text, **T5, local_radius=3,
      encoder_attention_type="local")  # fmt: skip

model("vit_msn", "ViTMSN", "ForImageClassification", labelled_image, **VISION, num_labels=5)
model(
    "dinov3_vit", "DINOv3ViT", "Model", lambda: {"pixel_values": numbers(2, 3, 32, 32)}, **VISION, num_register_tokens=2
)
model("glpn", "GLPN", "ForDepthEstimation", lambda: {"pixel_values": numbers(2, 3, 32, 32)}, num_encoder_blocks=2,
      depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2],
      num_attention_heads=[2, 4], mlp_ratios=[2, 2], decoder_hidden_size=8)  # fmt: skip
model("pvt_v2", "PvtV2", "ForImageClassification", labelled_image, image_size=32, num_encoder_blocks=2, depths=[1, 1],
      sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4],
      mlp_ratios=[2, 2], num_labels=5)  # fmt: skip
model("cvt", "Cvt", "ForImageClassification", labelled_image, patch_sizes=[7, 3], patch_stride=[4, 2],
      patch_padding=[2, 1], embed_dim=[16, 32], num_heads=[1, 2], depth=[1, 2], mlp_ratio=[2.0, 2.0], num_labels=5,
      attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0], drop_path_rate=[0.0, 0.0], qkv_bias=[True, True],
      cls_token=[False, True], qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1],
      stride_kv=[2, 2], padding_q=[1, 1], stride_q=[1, 1])  # fmt: skip
model("hgnet_v2", "HGNetV2", "ForImageClassification", labelled_image, embedding_size=8, depths=[1, 1, 1, 1],
      hidden_sizes=[8, 16, 16, 32], stage_in_channels=[8, 8, 16, 16], stage_mid_channels=[8, 8, 8, 8],
      stage_out_channels=[8, 16, 16, 32], stage_num_blocks=[1, 1, 1, 1], stage_numb_of_layers=[2, 2, 2, 2],
      stem_channels=[3, 8, 8], num_labels=5)  # fmt: skip
model("mobilevitv2", "MobileViTV2", "ForImageClassification",
      lambda: labelled_image() | {"pixel_values": numbers(2, 3, 64, 64)}, image_size=64, width_multiplier=0.25,
      num_labels=5)  # fmt: skip

model("sew_d", "SEWD", "ForCTC", heard, **WAVES, squeeze_factor=2, max_position_embeddings=32, position_buckets=8)
model("wav2vec2_bert", "Wav2Vec2Bert", "ForCTC",
      lambda: {"input_features": numbers(2, 20, 16), "labels": words(1, 5) % 29 + 1}, **SIZES, vocab_size=32,
      feature_projection_input_dim=16, conv_depthwise_kernel_size=5, mask_time_prob=0.0, layerdrop=0.0, pad_token_id=0,
      ctc_zero_infinity=True)  # fmt: skip
model("dac", "Dac", "Model", lambda: {"input_values": numbers(1, 1, 320)}, encoder_hidden_size=8, hidden_size=16,
      decoder_hidden_size=16, downsampling_ratios=[2, 4], upsampling_ratios=[4, 2], n_codebooks=2, codebook_size=16,
      codebook_dim=4)  # fmt: skip

_TOWERS = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}
model("chinese_clip", "ChineseCLIP", "Model", pair, **_TOWERS)
model("altclip", "AltCLIP", "Model", pair, vision_config=VISION, projection_dim=16,
      text_config=TEXT | {"project_dim": 32, "max_position_embeddings": 40})  # fmt: skip
model("internvl", "InternVL", "ForConditionalGeneration", lambda: illustrated(4), image_token_id=PICTURE,
      image_seq_length=4, text_config=LANGUAGE | {"model_type": "qwen2"},
      vision_config=TOWER | {"image_size": [32, 32], "patch_size": [8, 8]})  # fmt: skip

_LATENT = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2}


def hidden() -> Inputs:
    """Return a latent image and its target."""
    given = told(2, 4, 8, 8)
    given["hidden_states"] = given.pop("sample")
    return given


def film() -> Inputs:
    """Return a latent video and its target."""
    return {"hidden_states": numbers(2, 4, 2, 8, 8), "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": numbers(2, 5, 16)}  # fmt: skip


diffused("sana", "SanaTransformer2DModel", hidden, **_LATENT, sample_size=8, patch_size=1, num_cross_attention_heads=2,
         cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16)  # fmt: skip
diffused("latte", "LatteTransformer3DModel", film, **(_LATENT | {"out_channels": 8}), sample_size=8, patch_size=2,
         cross_attention_dim=16, caption_channels=16, video_length=2, norm_type="ada_norm_single",
         norm_elementwise_affine=False, activation_fn="gelu-approximate", attention_bias=True)  # fmt: skip
diffused("wan", "WanTransformer3DModel", film, num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
         num_layers=2, text_dim=16, freq_dim=8, ffn_dim=32, rope_max_seq_len=32)  # fmt: skip
diffused("autoencoder_asymmetric", "AsymmetricAutoencoderKL", lambda: {"sample": numbers(2, 3, 16, 16)},
         down_block_types=("DownEncoderBlock2D",) * 2, down_block_out_channels=(8, 16), layers_per_down_block=1,
         up_block_types=("UpDecoderBlock2D",) * 2, up_block_out_channels=(8, 16), layers_per_up_block=1, norm_num_groups=4,
         sample_size=16)  # fmt: skip
