"""Hugging Face's `generate()` on remote_accelerator. The KV cache stays on the executor."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import djinn

torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=1000, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval().to("remote_accelerator:0")
prompt = torch.randint(1, 1000, (1, 8)).to("remote_accelerator:0")
djinn.synchronize()

djinn.reset_stats()
tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=16, max_new_tokens=16)
print(tokens[0].tolist())
counted = djinn.stats()
print(
    f"{counted['round_trips']} round trips, {counted['bytes_sent']:,} bytes sent, {counted['templates_reused']} templates reused"
)
