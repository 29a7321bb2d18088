"""Small models of the families whose decoding is counted, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs
import torch

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    **_TOKENS,
}
_GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, **_TOKENS}
_EXPERTS = {**_DECODER, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SLIDING = {**_DECODER, "sliding_window": 32}
_STACKS = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 512,
    "decoder_start_token_id": 2,
    **_TOKENS,
}


@attrs.frozen
class DecodingFamily:
    """A family of transformers: its configuration, the fields that make it small, and the class of the model."""

    config: str
    fields: Mapping[str, Any]
    model: str

    def make(self) -> Any:
        """Return a model on the CPU."""
        import transformers

        torch.manual_seed(0)
        return getattr(transformers, self.model)(getattr(transformers, self.config)(**self.fields)).eval()


def _causal(name: str, fields: Mapping[str, Any], **more: Any) -> DecodingFamily:
    return DecodingFamily(f"{name}Config", {**fields, **more}, f"{name}ForCausalLM")


FAMILIES: Final[Mapping[str, DecodingFamily]] = MappingProxyType({
    "gpt2": DecodingFamily("GPT2Config", _GPT, "GPT2LMHeadModel"),
    "gptj": _causal("GPTJ", _GPT, rotary_dim=4),
    "gpt_neox": _causal("GPTNeoX", _DECODER),
    "gpt_neo": _causal("GPTNeo", {**_TOKENS, "vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4}, attention_types=[[["global", "local"], 1]], window_size=32, max_position_embeddings=512),
    "gpt_bigcode": _causal("GPTBigCode", _GPT),
    "opt": _causal("OPT", _DECODER, ffn_dim=48, word_embed_proj_dim=32),
    "codegen": _causal("CodeGen", {**_GPT, "n_head": 8}, rotary_dim=4),
    "bloom": _causal("Bloom", {**_TOKENS, "vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": _causal("Falcon", _DECODER),
    "llama": _causal("Llama", _DECODER),
    "qwen2": _causal("Qwen2", _DECODER),
    "qwen3": _causal("Qwen3", _DECODER, head_dim=8),
    "gemma": _causal("Gemma", _DECODER, head_dim=8),
    "gemma2": _causal("Gemma2", _SLIDING, head_dim=8),
    "gemma3": DecodingFamily("Gemma3TextConfig", {**_SLIDING, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}, "Gemma3ForCausalLM"),
    "mistral": _causal("Mistral", _SLIDING),
    "phi": _causal("Phi", _DECODER),
    "phi3": _causal("Phi3", _DECODER),
    "olmo2": _causal("Olmo2", _DECODER),
    "stablelm": _causal("StableLm", _DECODER),
    "granite": _causal("Granite", _DECODER),
    "starcoder2": _causal("Starcoder2", _DECODER),
    "cohere": _causal("Cohere", _DECODER),
    "biogpt": _causal("BioGpt", _DECODER),
    "mixtral": _causal("Mixtral", _EXPERTS),
    "qwen3_moe": _causal("Qwen3Moe", _EXPERTS, head_dim=8),
    "t5": DecodingFamily("T5Config", {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}, "T5ForConditionalGeneration"),
    "bart": DecodingFamily("BartConfig", {**_STACKS, "forced_eos_token_id": None}, "BartForConditionalGeneration"),
    "bert": DecodingFamily("BertConfig", {**_DECODER, "is_decoder": True}, "BertLMHeadModel"),
    "lfm2": _causal("Lfm2", _DECODER, full_attn_idxs=[1]),
    "jamba": _causal("Jamba", _DECODER, attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False),
    "mamba": _causal("Mamba", {**_TOKENS, "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
})  # fmt: skip
