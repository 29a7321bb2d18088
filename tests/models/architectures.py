"""Small models of many architectures, with inputs that each of them takes."""

from __future__ import annotations

import importlib

import torch
from torch import nn
from torch.nn import functional

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = SIZES | {"vocab_size": 99, "max_position_embeddings": 32}
VISION = SIZES | {"image_size": 32, "patch_size": 8}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}


def words(seed=0):
    return torch.randint(3, 90, (2, 10), generator=torch.Generator().manual_seed(seed))


def tensor(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def text():
    return {"input_ids": words(), "labels": words(1)}


def image():
    return {"pixel_values": tensor(2, 3, 32, 32), "labels": torch.tensor([1, 2])}


def pretrained(module, model, config, **settings):
    """A model of transformers; imported by name, because the package's own lookup imports far more."""
    package = f"transformers.models.{module}"
    make = getattr(importlib.import_module(f"{package}.modeling_{module}"), model)
    return make(getattr(importlib.import_module(f"{package}.configuration_{module}"), config)(**settings))


def gpt2():
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return pretrained("gpt2", "GPT2LMHeadModel", "GPT2Config", **sizes), text()


def bert():
    return pretrained("bert", "BertForMaskedLM", "BertConfig", **TEXT), {
        **text(),
        "attention_mask": (torch.arange(10) < torch.tensor([[10], [7]])).long(),
    }


def llama():
    return pretrained("llama", "LlamaForCausalLM", "LlamaConfig", **TEXT, num_key_value_heads=2), text()


def mixtral():
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return pretrained("mixtral", "MixtralForCausalLM", "MixtralConfig", **TEXT, **experts), text()


def t5():
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return pretrained("t5", "T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=0), text()


def whisper():
    layers = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "vocab_size": 99, "num_mel_bins": 80}
    limits = {"max_source_positions": 32, "max_target_positions": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = pretrained(
        "whisper", "WhisperForConditionalGeneration", "WhisperConfig", **layers, **HEADS, **limits, **tokens
    )
    return model, {"input_features": tensor(2, 80, 64), "labels": words(1)}


def vit():
    return pretrained("vit", "ViTForImageClassification", "ViTConfig", **VISION, num_labels=5), image()


def resnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return pretrained("resnet", "ResNetForImageClassification", "ResNetConfig", **sizes, num_labels=5), image()


def clip():
    towers = {"text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2}, "vision_config": VISION}
    model = pretrained("clip", "CLIPModel", "CLIPConfig", **towers, projection_dim=16)
    return model, {"input_ids": words(), "pixel_values": image()["pixel_values"], "return_loss": True}


class Recurrent(nn.Module):
    """Tags words; packs sequences where it is told their lengths."""

    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(99, 16)
        self.layers = kind(16, 24, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 99)

    def forward(self, input_ids, labels, lengths=None):
        given = self.embedding(input_ids)
        if lengths is not None:
            given = nn.utils.rnn.pack_padded_sequence(given, lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.layers(given)
        if lengths is not None:
            states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True)
        logits = self.head(states)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def lstm():
    return Recurrent(nn.LSTM), text()


def gru():
    return Recurrent(nn.GRU), text()


def packed_lstm():
    return Recurrent(nn.LSTM), {**text(), "lengths": [7, 10]}


ARCHITECTURES = {
    make.__name__: make for make in (bert, clip, gpt2, gru, llama, lstm, mixtral, packed_lstm, resnet, t5, vit, whisper)
}
