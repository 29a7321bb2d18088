"""Hugging Face's common model tests for one family, named by `DJINN_TEST_FAMILY`, with a small configuration of our own."""

from __future__ import annotations

import os
import shutil
import sys
import types
import unittest
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch

SOURCE, FAMILY = os.environ["TRANSFORMERS_SOURCE"], os.environ["DJINN_TEST_FAMILY"]


@attrs.frozen
class Family:
    """Names of a family's configuration and models, and the fields of the configuration that make it small."""

    config: str
    models: tuple[str, ...]
    fields: Mapping[str, Any]
    pixels: bool = False


_TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _TEXT | _TOKENS | {"num_key_value_heads": 2, "max_position_embeddings": 64}
_EXPERTS = _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 32,
    "patch_size": 8,
}
_STATES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8} | _TOKENS
_GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | _TOKENS


def _causal(name: str, fields: Mapping[str, Any]) -> Family:
    return Family(f"{name}Config", (f"{name}Model", f"{name}ForCausalLM"), fields)


def _masked(name: str) -> Family:
    return Family(
        f"{name}Config", (f"{name}Model", f"{name}ForMaskedLM"), _TEXT | _TOKENS | {"max_position_embeddings": 64}
    )


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
    "mamba": Family("MambaConfig", ("MambaModel", "MambaForCausalLM"), _STATES),
    "vit": Family("ViTConfig", ("ViTModel", "ViTForImageClassification"), _VISION, pixels=True),
    "deit": Family("DeiTConfig", ("DeiTModel",), _VISION, pixels=True),
    "dinov2": Family("Dinov2Config", ("Dinov2Model",), _VISION, pixels=True),
})  # fmt: skip


class Tester:
    """The configuration and inputs, as the mixin asks for them."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, family: Family) -> None:
        self.family = family
        if family.pixels:
            self.seq_length = (32 // 8) ** 2 + (2 if family.config.startswith("DeiT") else 1)

    def get_config(self) -> Any:
        """A small configuration."""
        import transformers

        return getattr(transformers, self.family.config)(**self.family.fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """The configuration, and inputs on the device."""
        from transformers.testing_utils import torch_device

        if self.family.pixels:
            return self.get_config(), {"pixel_values": torch.rand(self.batch_size, 3, 32, 32).to(torch_device)}
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length)).to(torch_device)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _common_tests() -> type:
    """The mixin of the source; its source distribution lacks two modules that it imports, whose tests are left out."""
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
    from tests.test_modeling_common import ModelTesterMixin

    return ModelTesterMixin


def _case(name: str) -> type:
    family = FAMILIES[name]

    def set_up(test: Any) -> None:
        test.model_tester = Tester(family)

    import transformers

    models = tuple(getattr(transformers, model) for model in family.models)
    body = {"__module__": __name__, "all_model_classes": models, "setUp": set_up}
    return type(name, (_common_tests(), unittest.TestCase), body)


if "TRANSFORMERS_TEST_DEVICE_SPEC" in os.environ:  # a name that is imported from the current directory
    shutil.copy(Path(__file__).with_name("device_spec.py"), os.environ["TRANSFORMERS_TEST_DEVICE_SPEC"])
globals()[FAMILY] = _case(FAMILY)
