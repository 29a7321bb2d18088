"""Hugging Face's common model tests for the family `DJINN_TEST_FAMILY`, with a small configuration."""

from __future__ import annotations

import copy
import os
import shutil
import sys
import types
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch

SOURCE, FAMILY = os.environ["TRANSFORMERS_SOURCE"], os.environ["DJINN_TEST_FAMILY"]


Inputs = Callable[[], dict[str, torch.Tensor]]


def _text() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 99, (3, 7))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _text_to_text() -> dict[str, torch.Tensor]:
    return _text() | {f"decoder_{name}": value for name, value in _text().items()}


def _image(size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(3, 3, size, size)}


def _samples() -> dict[str, torch.Tensor]:
    return {"input_values": torch.rand(3, 1024), "attention_mask": torch.ones(3, 1024, dtype=torch.long)}


def _spectrum_to_text() -> dict[str, torch.Tensor]:
    return {"input_features": torch.rand(3, 80, 60), "decoder_input_ids": _text()["input_ids"]}


def _text_and_image() -> dict[str, torch.Tensor]:
    return _text() | _image()


def _image_in_text() -> dict[str, torch.Tensor]:
    """Return tokens for the 16 patches of an image, followed by text."""
    patches = torch.full((3, 16), _IMAGE_TOKEN)
    ids = torch.cat([patches, _text()["input_ids"]], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | _image()


@attrs.frozen
class Family:
    """A family of models for the tests.

    Attributes:
        config, models: class names of the configuration and of the models.
        fields: fields that make the configuration small.
        inputs: function that returns the inputs of a model.
        tester: attributes that differ from those of `Tester`.
        case: attributes by which transformers' test mixin skips or selects tests.
    """

    config: str
    models: tuple[str, ...]
    fields: Mapping[str, Any]
    inputs: Inputs = _text
    tester: Mapping[str, Any] = MappingProxyType({})
    case: Mapping[str, Any] = MappingProxyType({})


_IMAGE_TOKEN = 4
_TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _TEXT | _TOKENS | {"num_key_value_heads": 2, "max_position_embeddings": 64}
# Grouped matrix products need rows of a multiple of 16 bytes.
_EXPERTS = _DECODER | {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 32,
    "patch_size": 8,
}
_STATES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8} | _TOKENS
_STATES_2 = _STATES | {"num_heads": 8, "head_dim": 8, "n_groups": 4, "chunk_size": 4}
_GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | _TOKENS
_T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4} | {
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_TWO_STACKS = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "decoder_start_token_id": 2,
} | _TOKENS
_BART = _TWO_STACKS | {"max_position_embeddings": 64, "forced_eos_token_id": None}
_WHISPER = _TWO_STACKS | {
    "num_mel_bins": 80,
    "max_source_positions": 30,
    "max_target_positions": 40,
    "begin_suppress_tokens": None,
}
_WAV2VEC2 = _TEXT | {
    "conv_dim": (32, 32, 32),
    "conv_stride": (4, 4, 4),
    "conv_kernel": (8, 8, 8),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.5,
    "mask_time_length": 2,
    "layerdrop": 0.0,
}
_CLIP = {
    "text_config": _TEXT | _TOKENS | {"max_position_embeddings": 64},
    "vision_config": _VISION,
    "projection_dim": 16,
}
_LLAVA = {
    "text_config": _DECODER | {"model_type": "llama"},
    "vision_config": _VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
    "image_token_id": _IMAGE_TOKEN,
    "image_seq_length": 16,
    "vision_feature_layer": -1,
}
_CONVNEXT = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "image_size": 32}
_SEGFORMER = {
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 2, 2],
    "decoder_hidden_size": 16,
}

_NO_ATTENTION = {"has_attentions": False}
_NO_TEXT = {"test_resize_embeddings": False}
_TWO_STACK_CASE = {"is_encoder_decoder": True}


def _causal(name: str, fields: Mapping[str, Any], **more: Any) -> Family:
    return Family(f"{name}Config", (f"{name}Model", f"{name}ForCausalLM"), fields, **more)


def _masked(name: str) -> Family:
    return Family(
        f"{name}Config", (f"{name}Model", f"{name}ForMaskedLM"), _TEXT | _TOKENS | {"max_position_embeddings": 64}
    )


def _vision(name: str, seq_length: int, *models: str) -> Family:
    names = tuple(f"{name}{model}" for model in ("Model", *models))
    return Family(f"{name}Config", names, _VISION, _image, tester={"seq_length": seq_length}, case=_NO_TEXT)


def _two_stacks(name: str, fields: Mapping[str, Any], inputs: Inputs, **tester: Any) -> Family:
    models = (f"{name}Model", f"{name}ForConditionalGeneration")
    return Family(f"{name}Config", models, fields, inputs, tester=tester, case=_TWO_STACK_CASE)


FAMILIES: Mapping[str, Family] = MappingProxyType({
    "bert": _masked("Bert"),
    "roberta": _masked("Roberta"),
    "electra": _masked("Electra"),
    "gpt2": Family("GPT2Config", ("GPT2Model", "GPT2LMHeadModel"), _GPT),
    "llama": _causal("Llama", _DECODER),
    "mistral": _causal("Mistral", _DECODER),
    "qwen2": _causal("Qwen2", _DECODER),
    "gemma": _causal("Gemma", _DECODER | {"head_dim": 8}),
    "phi": _causal("Phi", _DECODER),
    "olmo": _causal("Olmo", _DECODER),
    "mixtral": _causal("Mixtral", _EXPERTS),
    "t5": _two_stacks("T5", _T5, _text_to_text),
    "bart": _two_stacks("Bart", _BART, _text_to_text),
    "mamba": _causal("Mamba", _STATES, case=_NO_ATTENTION),
    "mamba2": _causal("Mamba2", _STATES_2, case=_NO_ATTENTION),
    "vit": _vision("ViT", 17, "ForImageClassification"),
    "deit": _vision("DeiT", 18),
    "dinov2": _vision("Dinov2", 17),
    "convnext": Family("ConvNextConfig", ("ConvNextModel", "ConvNextForImageClassification"), _CONVNEXT, _image, case=_NO_ATTENTION | _NO_TEXT),
    "segformer": Family("SegformerConfig", ("SegformerModel", "SegformerForSemanticSegmentation"), _SEGFORMER, lambda: _image(64), case=_NO_TEXT),
    "wav2vec2": Family("Wav2Vec2Config", ("Wav2Vec2Model", "Wav2Vec2ForCTC"), _WAV2VEC2, _samples, tester={"seq_length": 14}, case=_NO_TEXT),
    "whisper": _two_stacks("Whisper", _WHISPER, _spectrum_to_text, encoder_seq_length=30),
    "clip": Family("CLIPConfig", ("CLIPModel",), _CLIP, _text_and_image, case=_NO_ATTENTION | _NO_TEXT | {"_is_composite": True}),
    "llava": Family("LlavaConfig", ("LlavaModel", "LlavaForConditionalGeneration"), _LLAVA, _image_in_text, tester={"seq_length": 23}, case={"_is_composite": True}),
})  # fmt: skip


class Tester:
    """Model configuration and inputs, which transformers' test mixin reads from the attribute `model_tester`."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, family: Family) -> None:
        self.family = family
        vars(self).update(family.tester)

    def get_config(self) -> Any:
        """Return a small configuration."""
        import transformers

        return getattr(transformers, self.family.config)(**copy.deepcopy(dict(self.family.fields)))

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the configuration, and inputs on the device."""
        from transformers.testing_utils import torch_device

        return self.get_config(), {name: value.to(torch_device) for name, value in self.family.inputs().items()}


def _common_tests() -> type:
    """Return the mixin class of Hugging Face's common tests.

    The source distribution lacks two modules that the tests import. Tests that need them are skipped.
    """
    sys.path.insert(0, SOURCE)
    for module, name in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        if not Path(SOURCE, "tests", *module.split(".")).with_suffix(".py").exists():
            package = f"tests.{module.split('.')[0]}"
            sys.modules[package] = types.ModuleType(package)
            sys.modules[f"tests.{module}"] = types.ModuleType(f"tests.{module}")
            setattr(sys.modules[f"tests.{module}"], name, type(name, (), {}))
    from tests import test_modeling_common

    _share_tolerances(test_modeling_common._test_eager_matches_sdpa_inference)
    return test_modeling_common.ModelTesterMixin


def _share_tolerances(test: types.FunctionType) -> None:
    """Add the device to the devices that share CUDA's tolerances. Unknown devices get 1e-7 in half precision.

    Raises:
        LookupError: the source has no such list.
    """
    code, device_names = test.__code__, ("hpu", "npu", "tpu")
    if device_names not in code.co_consts:
        raise LookupError(f"{test.__name__} of this source has no list of devices {device_names}")
    consts = tuple(
        (*device_names, "remote_accelerator") if value == device_names else value for value in code.co_consts
    )
    test.__code__ = code.replace(co_consts=consts)


def _case(name: str) -> type:
    family = FAMILIES[name]

    def set_up(test: Any) -> None:
        test.model_tester = Tester(family)

    import transformers

    models = tuple(getattr(transformers, model) for model in family.models)
    body = {"__module__": __name__, "all_model_classes": models, "setUp": set_up, **family.case}
    return type(name, (_common_tests(), unittest.TestCase), body)


if "TRANSFORMERS_TEST_DEVICE_SPEC" in os.environ:  # a module imported from the current directory
    shutil.copy(Path(__file__).with_name("device_spec.py"), os.environ["TRANSFORMERS_TEST_DEVICE_SPEC"])
globals()[FAMILY] = _case(FAMILY)
