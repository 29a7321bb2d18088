"""Generate 64 tokens greedily with transformers' `generate()`. Weights are made on the device, so none are uploaded."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from evaluation.rivals.counting import Device, Phase

PROMPT, TOKENS = 16, 64
CALLS = ("first call", "second call")


def run_gpt2(device: Device, phase: Phase, layers: int, words: int) -> None:
    """Generate with a GPT-2. GPT-2 small has 12 layers and a vocabulary of 50,257 tokens."""
    ends = {"bos_token_id": words - 1, "eos_token_id": words - 1}
    _generate(GPT2LMHeadModel, GPT2Config(n_layer=layers, vocab_size=words, **ends), device, phase)


def run_llama(device: Device, phase: Phase, layers: int) -> None:
    """Generate with a Llama of this number of layers. Llama 7B has 32."""
    _generate(LlamaForCausalLM, LlamaConfig(num_hidden_layers=layers, dtype=torch.bfloat16), device, phase)


def _generate(kind: type[PreTrainedModel], config: GPT2Config | LlamaConfig, device: Device, phase: Phase) -> None:
    with torch.device(device):
        model = kind(config).eval()
    prompt = torch.randint(3, config.vocab_size, (1, PROMPT)).to(device)
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    for call in CALLS:
        with phase(call):
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).tolist()
