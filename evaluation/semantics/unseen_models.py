"""Models of transformers that no matcher was developed on: the first half of the part `unseen`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from evaluation.semantics.blind_models import DECODER
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
from evaluation.zoo.catalogue import ZOO
from evaluation.zoo.encoders import T5, TRANSLATOR
from evaluation.zoo.multimodal import LANGUAGE, PICTURE, TOWER, illustrated, pair

__all__ = ["PLAIN"]

LONG = 64


def model(
    name: str, package: str, prefix: str, head: str, inputs: Callable[[], Inputs], config: str = "", **settings: Any
) -> None:
    """Add an entry of transformers, by the names of its classes."""

    def make() -> tuple[nn.Module, Inputs]:
        return building.pretrained(package, f"{prefix}{head}", config or f"{prefix}Config", **settings), inputs()

    PLAIN[name] = Architecture(name, "unseen", make)


def data2vec(name: str, kind: str, config: str, inputs: Callable[[], Inputs], **settings: Any) -> None:
    """Add one of three models that share a package."""

    def make() -> tuple[nn.Module, Inputs]:
        import transformers

        built = getattr(transformers, f"Data2Vec{config}Config")(**settings)
        return getattr(transformers, f"Data2Vec{kind}")(built), inputs()

    PLAIN[name] = Architecture(name, "unseen", make)


def seen_elsewhere(*names: str) -> None:
    """Add entries of `evaluation/zoo` that were compared with local PyTorch but not labelled."""
    for name in names:
        PLAIN[name] = ZOO[name]


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


seen_elsewhere("convbert", "mobilebert", "tapas", "reformer", "led", "pegasus_x", "imagegpt",
               "swiftformer")  # fmt: skip
model("longformer_global", "longformer", "Longformer", "ForMaskedLM", _asked, **TEXT | {"max_position_embeddings": 40},
      attention_window=4)  # fmt: skip
model("big_bird_sparse", "big_bird", "BigBird", "ForMaskedLM", long_text, **TEXT | {"max_position_embeddings": LONG},
      attention_type="block_sparse", block_size=4, num_random_blocks=1)  # fmt: skip
model("nystromformer_landmarks", "nystromformer", "Nystromformer", "ForMaskedLM",
      lambda: {"input_ids": words(length=16), "labels": words(1, 16)}, **TEXT, num_landmarks=4,
      segment_means_seq_len=16)  # fmt: skip
model("yoso", "yoso", "Yoso", "ForMaskedLM", text, **TEXT, use_expectation=True)
model("luke", "luke", "Luke", "ForMaskedLM", _named, **TEXT | {"max_position_embeddings": 40}, entity_vocab_size=12,
      entity_emb_size=16)  # fmt: skip
_OLD = {"vocab_size": 99, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
model("flaubert", "flaubert", "Flaubert", "WithLMHeadModel", text, **_OLD)
model("xlm", "xlm", "XLM", "WithLMHeadModel", text, **_OLD)
model("ibert", "ibert", "IBert", "ForMaskedLM", padded_text, **TEXT | {"max_position_embeddings": 40})
model("nomic_bert", "nomic_bert", "NomicBert", "ForMaskedLM", padded_text, **TEXT)
model("splinter", "splinter", "Splinter", "Model", lambda: {"input_ids": words()}, **TEXT)
model("lilt", "lilt", "Lilt", "Model", _in_boxes, **TEXT | {"max_position_embeddings": 40, "hidden_size": 48})
model("xmod", "xmod", "Xmod", "ForMaskedLM", padded_text, **TEXT | {"max_position_embeddings": 40},
      default_language="en_XX")  # fmt: skip
model("clip_text", "clip", "CLIP", "TextModel", lambda: {"input_ids": words()}, "CLIPTextConfig", **TEXT)
model("metaclip_text", "metaclip_2", "MetaClip2", "TextModel", lambda: {"input_ids": words()}, "MetaClip2TextConfig",
      **TEXT)  # fmt: skip

# --- decoders ---
model("bitnet", "bitnet", "BitNet", "ForCausalLM", text, **DECODER)
model("jetmoe", "jetmoe", "JetMoe", "ForCausalLM", text, vocab_size=99, hidden_size=32, num_hidden_layers=2,
      num_key_value_heads=2, kv_channels=8, intermediate_size=64, max_position_embeddings=32, num_local_experts=4,
      num_experts_per_tok=2, pad_token_id=0)  # fmt: skip
model("dbrx", "dbrx", "Dbrx", "ForCausalLM", text, d_model=32, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=99,
      pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
      ffn_config={"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2})  # fmt: skip
model("doge", "doge", "Doge", "ForCausalLM", text, **DECODER)
model("nanochat", "nanochat", "NanoChat", "ForCausalLM", text, **DECODER)
model("ministral", "ministral", "Ministral", "ForCausalLM", text, **DECODER, head_dim=8, sliding_window=4)
model("cwm", "cwm", "Cwm", "ForCausalLM", text, **DECODER, head_dim=8, sliding_window=4)
model("vaultgemma", "vaultgemma", "VaultGemma", "ForCausalLM", text, **DECODER, head_dim=8, sliding_window=4,
      query_pre_attn_scalar=8)  # fmt: skip
model("flex_olmo", "flex_olmo", "FlexOlmo", "ForCausalLM", text, **DECODER, num_experts=4, num_experts_per_tok=2)
model("minicpm3", "minicpm3", "MiniCPM3", "ForCausalLM", text, **TEXT, num_key_value_heads=4, q_lora_rank=16,
      kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)  # fmt: skip
model("lfm2_moe", "lfm2_moe", "Lfm2Moe", "ForCausalLM", text, **DECODER, num_experts=4, num_experts_per_tok=2,
      moe_intermediate_size=32, num_dense_layers=1, layer_types=["conv", "full_attention"])  # fmt: skip
model("ernie4_5_moe", "ernie4_5_moe", "Ernie4_5_Moe", "ForCausalLM", text, **DECODER, moe_intermediate_size=32, moe_k=2,
      moe_num_experts=4, moe_num_shared_experts=1)  # fmt: skip
model("trocr", "trocr", "TrOCR", "ForCausalLM", text, d_model=32, decoder_layers=2, decoder_attention_heads=4,
      decoder_ffn_dim=64, vocab_size=99, max_position_embeddings=32, pad_token_id=0, bos_token_id=1,
      eos_token_id=2)  # fmt: skip

# --- encoders with decoders ---
model("bigbird_pegasus_sparse", "bigbird_pegasus", "BigBirdPegasus", "ForConditionalGeneration",
      lambda: {"input_ids": words(length=LONG), "labels": words(1)}, **TRANSLATOR | {"max_position_embeddings": LONG},
      attention_type="block_sparse", block_size=4, num_random_blocks=1)  # fmt: skip
model("longt5_global", "longt5", "LongT5", "ForConditionalGeneration", padded_text, **T5, local_radius=3,
      encoder_attention_type="transient-global", global_block_size=4)  # fmt: skip
model("prophetnet", "prophetnet", "ProphetNet", "ForConditionalGeneration", padded_text, vocab_size=99, hidden_size=32,
      encoder_ffn_dim=64, num_encoder_layers=2, num_encoder_attention_heads=4, decoder_ffn_dim=64, num_decoder_layers=2,
      num_decoder_attention_heads=4, max_position_embeddings=32, num_buckets=8, relative_max_distance=16,
      bos_token_id=1, eos_token_id=2)  # fmt: skip
model("fsmt", "fsmt", "FSMT", "ForConditionalGeneration", padded_text,
      **{k: v for k, v in TRANSLATOR.items() if k != "vocab_size"}, src_vocab_size=640, tgt_vocab_size=640)  # fmt: skip
_HALF = TEXT | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
model("t5gemma", "t5gemma", "T5Gemma", "ForConditionalGeneration", padded_text, encoder=_HALF, decoder=_HALF,
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
        given = _FOUND | settings | {"backbone_config": backbone}
        built = building.pretrained(name, f"{prefix}ForObjectDetection", f"{prefix}Config", **given)
        return built, {"pixel_values": numbers(2, 3, 64, 64)}

    PLAIN[name] = Architecture(name, "unseen", make)


detector("conditional_detr", "ConditionalDetr")
detector("table_transformer", "TableTransformer")
detector("deformable_detr", "DeformableDetr", num_feature_levels=1)
model("vitdet", "vitdet", "VitDet", "Model", pixels(), **VISION | {"mlp_ratio": 2}, window_block_indices=[0],
      window_size=2, pretrain_image_size=32, use_relative_position_embeddings=True)  # fmt: skip
model("textnet", "textnet", "TextNet", "ForImageClassification", labelled_image, stem_out_channels=8, image_size=[32, 32],
      conv_layer_kernel_sizes=[[[3, 3]], [[1, 3], [3, 1]], [[3, 3]], [[3, 3]]],
      conv_layer_strides=[[2], [2, 1], [2], [1]], hidden_sizes=[8, 8, 16, 16, 16], num_labels=5)  # fmt: skip
data2vec("data2vec_vision", "VisionForImageClassification", "Vision", labelled_image, **VISION, num_labels=5)
model("clip_vision", "clip", "CLIP", "VisionModel", pixels(), "CLIPVisionConfig", **VISION)
model("aimv2", "aimv2", "Aimv2", "VisionModel", pixels(), "Aimv2VisionConfig", **VISION)
model("vjepa2", "vjepa2", "VJEPA2", "Model", lambda: {"pixel_values_videos": numbers(1, 2, 3, 16, 16)}, patch_size=8,
      crop_size=16, frames_per_clip=2, hidden_size=48, num_attention_heads=2, num_hidden_layers=2, mlp_ratio=2.0,
      pred_hidden_size=48, pred_num_attention_heads=2, pred_num_hidden_layers=1, pred_num_mask_tokens=2)  # fmt: skip
model("pixio", "pixio", "Pixio", "Model", pixels(), **VISION | {"mlp_ratio": 2}, n_cls_tokens=2)
model("dinov3_convnext", "dinov3_convnext", "DINOv3ConvNext", "Model", pixels(), hidden_sizes=[8, 16, 16, 32],
      depths=[1, 1, 1, 1], image_size=32)  # fmt: skip
model("eomt", "eomt", "Eomt", "ForUniversalSegmentation", pixels(), **VISION | {"mlp_ratio": 2}, num_blocks=1,
      num_queries=5, num_upscale_blocks=1, num_register_tokens=1, num_labels=3)  # fmt: skip

# --- multimodal ---
_TOWERS = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}
model("metaclip_2", "metaclip_2", "MetaClip2", "Model", pair, **_TOWERS)
model("aimv2_lit", "aimv2", "Aimv2", "Model", lambda: {"input_ids": words(), "pixel_values": numbers(2, 3, 32, 32)},
      **_TOWERS)  # fmt: skip
_TINY = {"image_size": 32, "in_channels": [32, 8], "out_channels": [8, 8], "kernel_sizes": [3, 3], "strides": [1, 2],
         "num_block_repeats": [1, 1], "expand_ratios": [1, 2], "hidden_dim": 32, "width_coefficient": 1.0,
         "depth_coefficient": 1.0}  # fmt: skip
model("align", "align", "Align", "Model", pair, text_config=TEXT, vision_config=_TINY, projection_dim=8)
model("flava", "flava", "Flava", "Model", lambda: {"input_ids": words(), "pixel_values": numbers(2, 3, 32, 32)},
      text_config=TEXT, image_config=VISION, multimodal_config=SIZES, hidden_size=32, projection_dim=16)  # fmt: skip
model("bridgetower", "bridgetower", "BridgeTower", "Model",
      lambda: {"input_ids": words(), "attention_mask": torch.ones(2, 10).long(), "pixel_values": numbers(2, 3, 32, 32),
               "pixel_mask": torch.ones(2, 32, 32).long()}, hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
      text_config=TEXT | {"hidden_size": 64, "max_position_embeddings": 40},
      vision_config={"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 8, "image_size": 32})  # fmt: skip
model("layoutlmv3", "layoutlmv3", "LayoutLMv3", "Model", lambda: _in_boxes() | {"pixel_values": numbers(2, 3, 32, 32)},
      **TEXT | {"max_position_embeddings": 40}, input_size=32, patch_size=8, coordinate_size=5, shape_size=6)  # fmt: skip
_LLAMA = LANGUAGE | {"model_type": "llama"}
_SEES = TOWER | {"model_type": "clip_vision_model", "projection_dim": 16}
model("vipllava", "vipllava", "VipLlava", "ForConditionalGeneration", lambda: illustrated(16), text_config=_LLAMA,
      vision_config=_SEES, image_token_index=PICTURE, image_token_id=PICTURE, vision_feature_layer=[-1, -2])  # fmt: skip
model("aya_vision", "aya_vision", "AyaVision", "ForConditionalGeneration", lambda: illustrated(4), text_config=_LLAMA,
      vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}, image_token_index=PICTURE,
      image_token_id=PICTURE, vision_feature_layer=-1)  # fmt: skip
model("smolvlm", "smolvlm", "SmolVLM", "ForConditionalGeneration",
      lambda: illustrated(4) | {"pixel_values": numbers(2, 1, 3, 32, 32)}, image_token_id=PICTURE, scale_factor=2,
      vision_config=TOWER, text_config=_LLAMA, pad_token_id=0)  # fmt: skip

# --- audio, series ---
data2vec("data2vec_audio", "AudioForCTC", "Audio", heard, **WAVES)
model("parakeet", "parakeet", "Parakeet", "ForCTC",
      lambda: {"input_features": numbers(2, 64, 16)}, "ParakeetCTCConfig", vocab_size=32,
      pad_token_id=0, encoder_config=SIZES | {"conv_kernel_size": 5, "subsampling_factor": 4, "num_mel_bins": 16,
      "subsampling_conv_channels": 8, "layerdrop": 0.0})  # fmt: skip
model("musicgen", "musicgen", "Musicgen", "ForCausalLM", lambda: {"input_ids": torch.cat([words(i) for i in range(4)])},
      "MusicgenDecoderConfig", vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
      num_codebooks=4, max_position_embeddings=32, pad_token_id=0)  # fmt: skip
_AHEAD = {"prediction_length": 4, "context_length": 12, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
          "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
          "num_time_features": 2, "lags_sequence": [1, 2], "distribution_output": "normal"}  # fmt: skip


def _series() -> Inputs:
    known = {"past_values": numbers(2, 14).abs(), "past_time_features": numbers(2, 14, 2)}
    ahead = {"future_values": numbers(2, 4, seed=1).abs(), "future_time_features": numbers(2, 4, 2, seed=1)}
    return known | {"past_observed_mask": torch.ones(2, 14)} | ahead


model("time_series_transformer", "time_series_transformer", "TimeSeriesTransformer", "ForPrediction", _series, **_AHEAD)
model("informer", "informer", "Informer", "ForPrediction", _series, **_AHEAD, sampling_factor=2)
model("autoformer", "autoformer", "Autoformer", "ForPrediction", _series, **_AHEAD, label_length=4, moving_average=3)
model("timesfm", "timesfm", "TimesFm", "ModelForPrediction",
      lambda: {"past_values": [numbers(64), numbers(64, seed=1)], "freq": [0, 0]}, patch_length=8, context_length=64,
      horizon_length=8, num_hidden_layers=2, hidden_size=32, intermediate_size=64, head_dim=8,
      num_attention_heads=4)  # fmt: skip
