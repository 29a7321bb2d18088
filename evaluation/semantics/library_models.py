"""Models of transformers and diffusers that are labelled and not in `evaluation/zoo`."""

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
from evaluation.zoo.decoders import EXPERTS, GROUPED, ROUTED, STATES
from evaluation.zoo.diffusion import told
from evaluation.zoo.encoders import T5, TRANSLATOR
from evaluation.zoo.multimodal import LANGUAGE, PICTURE, TOWER, illustrated, pair

__all__ = ["PLAIN"]

LONG = 64
DECODER = TEXT | GROUPED


def model(name: str, prefix: str, head: str, inputs: Callable[[], Inputs], config: str = "", **settings: Any) -> None:
    """Add an entry of transformers. `name`: its module, or `entry@module`. `prefix`, `head`: parts of class names."""
    entry, _, module = name.partition("@")

    def make() -> tuple[nn.Module, Inputs]:
        return building.pretrained(
            module or entry, f"{prefix}{head}", config or f"{prefix}Config", **settings
        ), inputs()

    PLAIN[entry] = Architecture(entry, "labelled", make)


def decoder(module: str, prefix: str, config: str = "", **settings: Any) -> None:
    """Add a decoder with common sizes."""
    model(module, prefix, "ForCausalLM", text, config, **(TEXT | settings))


def diffused(name: str, kind: str, inputs: Callable[[], Inputs], **settings: Any) -> None:
    """Add an entry of diffusers."""

    def make() -> tuple[nn.Module, Inputs]:
        import diffusers

        return getattr(diffusers, kind)(**settings), inputs()

    PLAIN[name] = Architecture(name, "diffusion", make)


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
model("dots1", "Dots1", "ForCausalLM", text, **(TEXT | EXPERTS | ROUTED), head_dim=8)
model("glm4_moe", "Glm4Moe", "ForCausalLM", text, **(TEXT | EXPERTS | ROUTED), head_dim=8)
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
    inputs = told(2, 4, 8, 8)
    inputs["hidden_states"] = inputs.pop("sample")
    return inputs


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

# --- decoders with recurrent layers
_HEADS = GROUPED | {"head_dim": 8}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


decoder("xlstm", "xLSTM", hidden_size=128, num_heads=2, num_blocks=2, chunk_size=4)
decoder("falcon_h1", "FalconH1", **_HEADS, **STATES, mamba_d_ssm=64)
decoder("nemotron_h", "NemotronH", **_HEADS, layers_block_type=["mamba", "attention"], mamba_num_heads=8,
         mamba_head_dim=8, n_groups=2, ssm_state_size=8, chunk_size=4)  # fmt: skip
decoder(
    "olmo_hybrid", "OlmoHybrid", num_key_value_heads=2, **_LINEAR, layer_types=["linear_attention", "full_attention"]
)
decoder("minimax", "MiniMax", **_HEADS, num_local_experts=4, layer_types=["linear_attention", "full_attention"],
         block_size=4)  # fmt: skip
decoder("kimi_linear", "KimiLinear", kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
         moe_intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, n_shared_experts=1, linear_head_dim=8,
         linear_num_heads=4, layer_types=["linear_attention", "full_attention"])  # fmt: skip
decoder("qwen3_5", "Qwen3_5", "Qwen3_5TextConfig", **_HEADS, **_LINEAR,
         layer_types=["linear_attention", "full_attention"])  # fmt: skip
decoder("granitemoehybrid", "GraniteMoeHybrid", num_key_value_heads=2, **STATES, num_local_experts=4,
         num_experts_per_tok=2, layer_types=["mamba", "attention"], shared_intermediate_size=32)  # fmt: skip


def data2vec(name: str, kind: str, config: str, inputs: Callable[[], Inputs], **settings: Any) -> None:
    """Add an entry of data2vec, whose three models share a package."""

    def make() -> tuple[nn.Module, Inputs]:
        import transformers

        config_object = getattr(transformers, f"Data2Vec{config}Config")(**settings)
        return getattr(transformers, f"Data2Vec{kind}")(config_object), inputs()

    PLAIN[name] = Architecture(name, "labelled", make)


def pixels(size: int = 32) -> Callable[[], Inputs]:
    """Return images alone."""
    return lambda: {"pixel_values": numbers(2, 3, size, size)}


def long_text() -> Inputs:
    """Return longer sequences, for blockwise attention."""
    return {"input_ids": words(length=LONG), "labels": words(1, LONG)}


# --- encoders of text ---
def _asked() -> Inputs:
    marks = torch.zeros(2, 10).long()
    marks[:, 0] = 1
    return padded_text() | {"global_attention_mask": marks}


def _named() -> Inputs:
    spans = torch.tensor([[[1, 2, -1, -1], [4, -1, -1, -1]]] * 2)
    entities = {"entity_ids": torch.tensor([[1, 2], [3, 4]]), "entity_attention_mask": torch.ones(2, 2).long()}
    return padded_text() | entities | {"entity_position_ids": spans}


def _in_boxes() -> Inputs:
    return {"input_ids": words(), "bbox": torch.tensor([10, 20, 30, 40]).expand(2, 10, 4)}


model("longformer_global@longformer", "Longformer", "ForMaskedLM", _asked, **TEXT | {"max_position_embeddings": 40},
      attention_window=4)  # fmt: skip
model("big_bird_sparse@big_bird", "BigBird", "ForMaskedLM", long_text, **TEXT | {"max_position_embeddings": LONG},
      attention_type="block_sparse", block_size=4, num_random_blocks=1)  # fmt: skip
model("nystromformer_landmarks@nystromformer", "Nystromformer", "ForMaskedLM",
      lambda: {"input_ids": words(length=16), "labels": words(1, 16)}, **TEXT, num_landmarks=4,
      segment_means_seq_len=16)  # fmt: skip
model("yoso", "Yoso", "ForMaskedLM", text, **TEXT, use_expectation=True)
model("luke", "Luke", "ForMaskedLM", _named, **TEXT | {"max_position_embeddings": 40}, entity_vocab_size=12,
      entity_emb_size=16)  # fmt: skip
_OLD = {"vocab_size": 99, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
model("flaubert", "Flaubert", "WithLMHeadModel", text, **_OLD)
model("xlm", "XLM", "WithLMHeadModel", text, **_OLD)
model("ibert", "IBert", "ForMaskedLM", padded_text, **TEXT | {"max_position_embeddings": 40})
model("nomic_bert", "NomicBert", "ForMaskedLM", padded_text, **TEXT)
model("splinter", "Splinter", "Model", lambda: {"input_ids": words()}, **TEXT)
model("lilt", "Lilt", "Model", _in_boxes, **TEXT | {"max_position_embeddings": 40, "hidden_size": 48})
model("xmod", "Xmod", "ForMaskedLM", padded_text, **TEXT | {"max_position_embeddings": 40},
      default_language="en_XX")  # fmt: skip
model("clip_text@clip", "CLIP", "TextModel", lambda: {"input_ids": words()}, "CLIPTextConfig", **TEXT)
model("metaclip_text@metaclip_2", "MetaClip2", "TextModel", lambda: {"input_ids": words()}, "MetaClip2TextConfig",
      **TEXT)  # fmt: skip

# --- decoders ---
model("bitnet", "BitNet", "ForCausalLM", text, **DECODER)
model("jetmoe", "JetMoe", "ForCausalLM", text, vocab_size=99, hidden_size=32, num_hidden_layers=2,
      num_key_value_heads=2, kv_channels=8, intermediate_size=64, max_position_embeddings=32, num_local_experts=4,
      num_experts_per_tok=2, pad_token_id=0)  # fmt: skip
model("dbrx", "Dbrx", "ForCausalLM", text, d_model=32, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=99,
      pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
      ffn_config={"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2})  # fmt: skip
model("doge", "Doge", "ForCausalLM", text, **DECODER)
model("nanochat", "NanoChat", "ForCausalLM", text, **DECODER)
model("ministral", "Ministral", "ForCausalLM", text, **DECODER, head_dim=8, sliding_window=4)
model("cwm", "Cwm", "ForCausalLM", text, **DECODER, head_dim=8, sliding_window=4)
model("vaultgemma", "VaultGemma", "ForCausalLM", text, **DECODER, head_dim=8, sliding_window=4,
      query_pre_attn_scalar=8)  # fmt: skip
model("flex_olmo", "FlexOlmo", "ForCausalLM", text, **DECODER, num_experts=4, num_experts_per_tok=2)
model("minicpm3", "MiniCPM3", "ForCausalLM", text, **TEXT, num_key_value_heads=4, q_lora_rank=16,
      kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)  # fmt: skip
model("lfm2_moe", "Lfm2Moe", "ForCausalLM", text, **DECODER, num_experts=4, num_experts_per_tok=2,
      moe_intermediate_size=32, num_dense_layers=1, layer_types=["conv", "full_attention"])  # fmt: skip
model("ernie4_5_moe", "Ernie4_5_Moe", "ForCausalLM", text, **DECODER, moe_intermediate_size=32, moe_k=2,
      moe_num_experts=4, moe_num_shared_experts=1)  # fmt: skip
model("trocr", "TrOCR", "ForCausalLM", text, d_model=32, decoder_layers=2, decoder_attention_heads=4,
      decoder_ffn_dim=64, vocab_size=99, max_position_embeddings=32, pad_token_id=0, bos_token_id=1,
      eos_token_id=2)  # fmt: skip

# --- encoders with decoders ---
model("bigbird_pegasus_sparse@bigbird_pegasus", "BigBirdPegasus", "ForConditionalGeneration",
      lambda: {"input_ids": words(length=LONG), "labels": words(1)}, **TRANSLATOR | {"max_position_embeddings": LONG},
      attention_type="block_sparse", block_size=4, num_random_blocks=1)  # fmt: skip
model("longt5_global@longt5", "LongT5", "ForConditionalGeneration", padded_text, **T5, local_radius=3,
      encoder_attention_type="transient-global", global_block_size=4)  # fmt: skip
model("prophetnet", "ProphetNet", "ForConditionalGeneration", padded_text, vocab_size=99, hidden_size=32,
      encoder_ffn_dim=64, num_encoder_layers=2, num_encoder_attention_heads=4, decoder_ffn_dim=64, num_decoder_layers=2,
      num_decoder_attention_heads=4, max_position_embeddings=32, num_buckets=8, relative_max_distance=16,
      bos_token_id=1, eos_token_id=2)  # fmt: skip
model("fsmt", "FSMT", "ForConditionalGeneration", padded_text,
      **{k: v for k, v in TRANSLATOR.items() if k != "vocab_size"}, src_vocab_size=640, tgt_vocab_size=640)  # fmt: skip
_HALF = TEXT | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
model("t5gemma", "T5Gemma", "ForConditionalGeneration", padded_text, encoder=_HALF, decoder=_HALF,
      vocab_size=99)  # fmt: skip

# --- images ---
_FOUND = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 5, "num_labels": 3,
          "use_timm_backbone": False}  # fmt: skip


def detector(name: str, prefix: str, **settings: Any) -> None:
    """Add a detector over a small ResNet."""

    def make() -> tuple[nn.Module, Inputs]:
        from transformers import ResNetConfig

        backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
                                out_features=["stage2"])  # fmt: skip
        inputs = _FOUND | settings | {"backbone_config": backbone}
        model = building.pretrained(name, f"{prefix}ForObjectDetection", f"{prefix}Config", **inputs)
        return model, {"pixel_values": numbers(2, 3, 64, 64)}

    PLAIN[name] = Architecture(name, "labelled", make)


detector("conditional_detr", "ConditionalDetr")
detector("table_transformer", "TableTransformer")
detector("deformable_detr", "DeformableDetr", num_feature_levels=1)
model("vitdet", "VitDet", "Model", pixels(), **VISION | {"mlp_ratio": 2}, window_block_indices=[0],
      window_size=2, pretrain_image_size=32, use_relative_position_embeddings=True)  # fmt: skip
model("textnet", "TextNet", "ForImageClassification", labelled_image, stem_out_channels=8, image_size=[32, 32],
      conv_layer_kernel_sizes=[[[3, 3]], [[1, 3], [3, 1]], [[3, 3]], [[3, 3]]],
      conv_layer_strides=[[2], [2, 1], [2], [1]], hidden_sizes=[8, 8, 16, 16, 16], num_labels=5)  # fmt: skip
data2vec("data2vec_vision", "VisionForImageClassification", "Vision", labelled_image, **VISION, num_labels=5)
model("clip_vision@clip", "CLIP", "VisionModel", pixels(), "CLIPVisionConfig", **VISION)
model("aimv2", "Aimv2", "VisionModel", pixels(), "Aimv2VisionConfig", **VISION)
model("vjepa2", "VJEPA2", "Model", lambda: {"pixel_values_videos": numbers(1, 2, 3, 16, 16)}, patch_size=8,
      crop_size=16, frames_per_clip=2, hidden_size=48, num_attention_heads=2, num_hidden_layers=2, mlp_ratio=2.0,
      pred_hidden_size=48, pred_num_attention_heads=2, pred_num_hidden_layers=1, pred_num_mask_tokens=2)  # fmt: skip
model("pixio", "Pixio", "Model", pixels(), **VISION | {"mlp_ratio": 2}, n_cls_tokens=2)
model("dinov3_convnext", "DINOv3ConvNext", "Model", pixels(), hidden_sizes=[8, 16, 16, 32],
      depths=[1, 1, 1, 1], image_size=32)  # fmt: skip
model("eomt", "Eomt", "ForUniversalSegmentation", pixels(), **VISION | {"mlp_ratio": 2}, num_blocks=1,
      num_queries=5, num_upscale_blocks=1, num_register_tokens=1, num_labels=3)  # fmt: skip

# --- multimodal ---
model("metaclip_2", "MetaClip2", "Model", pair, **_TOWERS)
model("aimv2_lit@aimv2", "Aimv2", "Model", lambda: {"input_ids": words(), "pixel_values": numbers(2, 3, 32, 32)},
      **_TOWERS)  # fmt: skip
_TINY = {"image_size": 32, "in_channels": [32, 8], "out_channels": [8, 8], "kernel_sizes": [3, 3], "strides": [1, 2],
         "num_block_repeats": [1, 1], "expand_ratios": [1, 2], "hidden_dim": 32, "width_coefficient": 1.0,
         "depth_coefficient": 1.0}  # fmt: skip
model("align", "Align", "Model", pair, text_config=TEXT, vision_config=_TINY, projection_dim=8)
model("flava", "Flava", "Model", lambda: {"input_ids": words(), "pixel_values": numbers(2, 3, 32, 32)},
      text_config=TEXT, image_config=VISION, multimodal_config=SIZES, hidden_size=32, projection_dim=16)  # fmt: skip
model("bridgetower", "BridgeTower", "Model",
      lambda: {"input_ids": words(), "attention_mask": torch.ones(2, 10).long(), "pixel_values": numbers(2, 3, 32, 32),
               "pixel_mask": torch.ones(2, 32, 32).long()}, hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
      text_config=TEXT | {"hidden_size": 64, "max_position_embeddings": 40},
      vision_config={"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 8, "image_size": 32})  # fmt: skip
model("layoutlmv3", "LayoutLMv3", "Model", lambda: _in_boxes() | {"pixel_values": numbers(2, 3, 32, 32)},
      **TEXT | {"max_position_embeddings": 40}, input_size=32, patch_size=8, coordinate_size=5, shape_size=6)  # fmt: skip
_LLAMA = LANGUAGE | {"model_type": "llama"}
_SEES = TOWER | {"model_type": "clip_vision_model", "projection_dim": 16}
model("vipllava", "VipLlava", "ForConditionalGeneration", lambda: illustrated(16), text_config=_LLAMA,
      vision_config=_SEES, image_token_index=PICTURE, image_token_id=PICTURE, vision_feature_layer=[-1, -2])  # fmt: skip
model("aya_vision", "AyaVision", "ForConditionalGeneration", lambda: illustrated(4), text_config=_LLAMA,
      vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}, image_token_index=PICTURE,
      image_token_id=PICTURE, vision_feature_layer=-1)  # fmt: skip
model("smolvlm", "SmolVLM", "ForConditionalGeneration",
      lambda: illustrated(4) | {"pixel_values": numbers(2, 1, 3, 32, 32)}, image_token_id=PICTURE, scale_factor=2,
      vision_config=TOWER, text_config=_LLAMA, pad_token_id=0)  # fmt: skip

# --- audio, series ---
data2vec("data2vec_audio", "AudioForCTC", "Audio", heard, **WAVES)
model("parakeet", "Parakeet", "ForCTC",
      lambda: {"input_features": numbers(2, 64, 16)}, "ParakeetCTCConfig", vocab_size=32,
      pad_token_id=0, encoder_config=SIZES | {"conv_kernel_size": 5, "subsampling_factor": 4, "num_mel_bins": 16,
      "subsampling_conv_channels": 8, "layerdrop": 0.0})  # fmt: skip
model("musicgen", "Musicgen", "ForCausalLM", lambda: {"input_ids": torch.cat([words(i) for i in range(4)])},
      "MusicgenDecoderConfig", vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
      num_codebooks=4, max_position_embeddings=32, pad_token_id=0)  # fmt: skip
_AHEAD = {"prediction_length": 4, "context_length": 12, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
          "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
          "num_time_features": 2, "lags_sequence": [1, 2], "distribution_output": "normal"}  # fmt: skip


def _series() -> Inputs:
    past_values = {"past_values": numbers(2, 14).abs(), "past_time_features": numbers(2, 14, 2)}
    ahead = {"future_values": numbers(2, 4, seed=1).abs(), "future_time_features": numbers(2, 4, 2, seed=1)}
    return past_values | {"past_observed_mask": torch.ones(2, 14)} | ahead


model("time_series_transformer", "TimeSeriesTransformer", "ForPrediction", _series, **_AHEAD)
model("informer", "Informer", "ForPrediction", _series, **_AHEAD, sampling_factor=2)
model("autoformer", "Autoformer", "ForPrediction", _series, **_AHEAD, label_length=4, moving_average=3)
model("timesfm", "TimesFm", "ModelForPrediction",
      lambda: {"past_values": [numbers(64), numbers(64, seed=1)], "freq": [0, 0]}, patch_length=8, context_length=64,
      horizon_length=8, num_hidden_layers=2, hidden_size=32, intermediate_size=64, head_dim=8,
      num_attention_heads=4)  # fmt: skip
