"""Models of images and text together."""

from __future__ import annotations

import torch
from torch import nn

from evaluation.zoo.building import SIZES, TEXT, VISION, Inputs, architecture, numbers, pretrained, words

PICTURE = 98  # the placeholder token for an image's patches
TOWER = VISION | {"hidden_act": "gelu"}
LANGUAGE = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 64}


def pair() -> Inputs:
    """Return two texts with an image each."""
    return {"input_ids": words(), "pixel_values": numbers(2, 3, 32, 32), "return_loss": True}


def illustrated(patches: int) -> Inputs:
    """Return two texts that begin with an image's patches."""
    ids = torch.cat([torch.full((2, patches), PICTURE), words()], dim=1)
    labels = torch.where(ids == PICTURE, -100, ids)
    return {"input_ids": ids, "labels": labels, "pixel_values": numbers(2, 3, 32, 32)}


@architecture("multimodal")
def clip() -> tuple[nn.Module, Inputs]:
    """Return CLIP: images and text in one space."""
    towers = {"text_config": TEXT, "vision_config": VISION}
    return pretrained("clip", "CLIPModel", "CLIPConfig", **towers, projection_dim=16), pair()


@architecture("multimodal")
def siglip() -> tuple[nn.Module, Inputs]:
    """Return SigLIP: images and text in one space, with a pairwise loss."""
    towers = {"text_config": TEXT, "vision_config": VISION}
    return pretrained("siglip", "SiglipModel", "SiglipConfig", **towers), pair()


@architecture("multimodal")
def blip() -> tuple[nn.Module, Inputs]:
    """Return an image captioner."""
    text = TEXT | {"encoder_hidden_size": 32, "projection_dim": 16}
    towers = {"text_config": text, "vision_config": VISION | {"projection_dim": 16}}
    model = pretrained("blip", "BlipForConditionalGeneration", "BlipConfig", **towers, projection_dim=16)
    return model, {"input_ids": words(), "labels": words(1), "pixel_values": numbers(2, 3, 32, 32)}


@architecture("multimodal")
def blip_2() -> tuple[nn.Module, Inputs]:
    """Return BLIP-2: learnt queries between the image and the language model."""
    text = TEXT | {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32}
    asks = SIZES | {"encoder_hidden_size": 32, "vocab_size": 99}
    model = pretrained(
        "blip_2", "Blip2ForConditionalGeneration", "Blip2Config", vision_config=VISION, qformer_config=asks,
        text_config=text, num_query_tokens=4, image_token_index=PICTURE, image_token_id=PICTURE,
    )  # fmt: skip
    return model, illustrated(4)


@architecture("multimodal", writes=True)
def llava() -> tuple[nn.Module, Inputs]:
    """Return LLaVA: patches replace tokens."""
    towers = {
        "text_config": LANGUAGE | {"model_type": "llama"},
        "vision_config": TOWER | {"model_type": "clip_vision_model", "projection_dim": 16},
    }
    model = pretrained(
        "llava", "LlavaForConditionalGeneration", "LlavaConfig", **towers, image_token_index=PICTURE,
        image_token_id=PICTURE, vision_feature_layer=-1,
    )  # fmt: skip
    return model, illustrated(16)


@architecture("multimodal", writes=True)
def paligemma() -> tuple[nn.Module, Inputs]:
    """Return PaliGemma: SigLIP before Gemma."""
    towers = {
        "text_config": LANGUAGE | {"model_type": "gemma", "head_dim": 8, "num_image_tokens": 16},
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False},
    }
    model = pretrained(
        "paligemma", "PaliGemmaForConditionalGeneration", "PaliGemmaConfig", **towers, image_token_index=PICTURE,
        image_token_id=PICTURE, projection_dim=32,
    )  # fmt: skip
    inputs = illustrated(16)
    return model, inputs | {"token_type_ids": (inputs["input_ids"] != PICTURE).long()}


@architecture("multimodal", writes=True)
def idefics3() -> tuple[nn.Module, Inputs]:
    """Return Idefics3: pixel shuffle before Llama."""
    model = pretrained(
        "idefics3", "Idefics3ForConditionalGeneration", "Idefics3Config", image_token_id=PICTURE, scale_factor=2,
        vision_config=TOWER, text_config=LANGUAGE | {"model_type": "llama"}, pad_token_id=0,
    )  # fmt: skip
    inputs = illustrated(4)
    return model, inputs | {"pixel_values": inputs["pixel_values"].unsqueeze(1)}


QWEN_TOKENS = {"image_token_id": PICTURE, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}
QWEN_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def qwen_inputs() -> Inputs:
    """Return two texts that begin with an image of 4 x 4 patches, which become 4 tokens."""
    ids = torch.cat([torch.full((2, 1), 96), torch.full((2, 4), PICTURE), torch.full((2, 1), 95), words()], dim=1)
    return {
        "input_ids": ids, "labels": ids.clone(), "pixel_values": numbers(32, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]), "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == PICTURE).int(),
    }  # fmt: skip


@architecture("multimodal", writes=True)
def qwen2_vl() -> tuple[nn.Module, Inputs]:
    """Return Qwen2-VL: positions in time, height and width."""
    tower = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8,
             "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
    model = pretrained(
        "qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2VLConfig", vision_config=tower,
        text_config=LANGUAGE | {"rope_parameters": QWEN_ROPE}, **QWEN_TOKENS,
    )  # fmt: skip
    return model, qwen_inputs()


@architecture("multimodal", writes=True)
def qwen2_5_vl() -> tuple[nn.Module, Inputs]:
    """Return Qwen2.5-VL: windowed attention over patches."""
    tower = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": 32, "patch_size": 8,
             "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1]}  # fmt: skip
    model = pretrained(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", vision_config=tower,
        text_config=LANGUAGE | {"rope_parameters": QWEN_ROPE}, **QWEN_TOKENS,
    )  # fmt: skip
    return model, qwen_inputs()


@architecture("multimodal")
def vilt() -> tuple[nn.Module, Inputs]:
    """Return ViLT: one encoder for images and text."""
    model = pretrained("vilt", "ViltForQuestionAnswering", "ViltConfig", **(VISION | TEXT), num_labels=5)
    marks = {"attention_mask": torch.ones(2, 10).long(), "pixel_mask": torch.ones(2, 32, 32).long()}
    answers = torch.eye(5)[:2]
    return model, {"input_ids": words(), "pixel_values": numbers(2, 3, 32, 32), **marks, "labels": answers}


@architecture("multimodal", writes=True)
def git() -> tuple[nn.Module, Inputs]:
    """Return GIT: text that continues an image."""
    model = pretrained("git", "GitForCausalLM", "GitConfig", **TEXT, vision_config=VISION)
    return model, {"input_ids": words(), "labels": words(1), "pixel_values": numbers(2, 3, 32, 32)}


@architecture("multimodal")
def owlvit() -> tuple[nn.Module, Inputs]:
    """Return OWL-ViT: detection by text."""
    towers = {"text_config": TEXT, "vision_config": VISION}
    model = pretrained("owlvit", "OwlViTForObjectDetection", "OwlViTConfig", **towers, projection_dim=32)
    return model, {
        "input_ids": words(),
        "attention_mask": torch.ones(2, 10).long(),
        "pixel_values": numbers(2, 3, 32, 32),
    }


@architecture("multimodal")
def clipseg() -> tuple[nn.Module, Inputs]:
    """Return CLIPSeg: segmentation by text."""
    towers = {"text_config": TEXT, "vision_config": VISION}
    model = pretrained(
        "clipseg", "CLIPSegForImageSegmentation", "CLIPSegConfig", **towers, projection_dim=16, extract_layers=[0, 1],
        reduce_dim=16, decoder_num_attention_heads=4, decoder_intermediate_size=32,
    )  # fmt: skip
    return model, {"input_ids": words(), "pixel_values": numbers(2, 3, 32, 32), "labels": numbers(2, 32, 32).sigmoid()}
