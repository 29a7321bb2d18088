"""Decoders: language models."""

from __future__ import annotations

from typing import Any

from evaluation.zoo.building import TEXT, row, text

GROUPED = {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
NARROW = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": 4}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}


def decoder(module: str, prefix: str, head: str = "ForCausalLM", **settings: Any) -> None:
    """Add an entry with common sizes."""
    row("decoder", module, prefix, head, text, writes=True, **(TEXT | settings))


def older(module: str, prefix: str, head: str = "ForCausalLM", **settings: Any) -> None:
    """Add an entry whose configuration has other names for its sizes."""
    row("decoder", module, prefix, head, text, writes=True, **(NARROW | settings))


older("gpt2", "GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=32)
older("gptj", "GPTJ", n_embd=32, n_layer=2, n_head=4, n_positions=32, rotary_dim=4)
older("codegen", "CodeGen", n_embd=32, n_layer=2, n_head=4, n_positions=32, n_ctx=32, rotary_dim=4)
older("gpt_bigcode", "GPTBigCode", n_embd=32, n_layer=2, n_head=4, n_positions=32)
older(
    "gpt_neo", "GPTNeo", hidden_size=32, num_layers=2, num_heads=4, window_size=4, max_position_embeddings=32,
    attention_types=[[["global", "local"], 1]],
)  # fmt: skip
older("bloom", "Bloom", hidden_size=32, n_layer=2, n_head=4)
older("mpt", "Mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=32)
older("ctrl", "CTRL", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=32, dff=64)
older("xlnet", "XLNet", "LMHeadModel", d_model=32, n_layer=2, n_head=4, d_inner=64)
decoder("gpt_neox", "GPTNeoX", rotary_pct=0.5)
decoder("opt", "OPT", ffn_dim=64, word_embed_proj_dim=16)
decoder("xglm", "XGLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=64)
decoder("biogpt", "BioGpt")
decoder("falcon", "Falcon", new_decoder_architecture=True, num_kv_heads=2)
decoder("llama", "Llama", **GROUPED)
decoder("mistral", "Mistral", **GROUPED, sliding_window=4)
decoder("qwen2", "Qwen2", **GROUPED)
decoder("qwen3", "Qwen3", **GROUPED, head_dim=8)
decoder("gemma", "Gemma", **GROUPED, head_dim=8)
decoder("gemma2", "Gemma2", **GROUPED, head_dim=8, sliding_window=4)
decoder("gemma3", "Gemma3", config="Gemma3TextConfig", **GROUPED, head_dim=8, sliding_window=4)
decoder("phi", "Phi", partial_rotary_factor=0.5)
decoder("phi3", "Phi3", **GROUPED)
decoder("olmo", "Olmo")
decoder("olmo2", "Olmo2")
decoder("stablelm", "StableLm", **GROUPED)
decoder("starcoder2", "Starcoder2", **GROUPED)
decoder("cohere", "Cohere", **GROUPED)
decoder("cohere2", "Cohere2", **GROUPED)
decoder("granite", "Granite", **GROUPED)
decoder("smollm3", "SmolLM3", **GROUPED)
decoder("glm", "Glm", **GROUPED, head_dim=8)
decoder("glm4", "Glm4", **GROUPED, head_dim=8)
decoder("persimmon", "Persimmon")
decoder("nemotron", "Nemotron", **GROUPED)
decoder("modernbert_decoder", "ModernBertDecoder")
decoder("mixtral", "Mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2)
decoder("qwen2_moe", "Qwen2Moe", **EXPERTS, num_experts=4, shared_expert_intermediate_size=32)
decoder("qwen3_moe", "Qwen3Moe", **EXPERTS, num_experts=4, head_dim=8)
decoder("olmoe", "Olmoe", **GROUPED, num_experts=4, num_experts_per_tok=2)
decoder("phimoe", "Phimoe", **GROUPED, num_local_experts=4)
decoder("granitemoe", "GraniteMoe", **GROUPED, num_local_experts=4, num_experts_per_tok=2)
decoder("gpt_oss", "GptOss", **GROUPED, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4)
decoder("deepseek_v2", "DeepseekV2", **LATENT, **ROUTED, moe_intermediate_size=32, num_experts_per_tok=2)
decoder("deepseek_v3", "DeepseekV3", **LATENT, **ROUTED, moe_intermediate_size=32, num_experts_per_tok=2)

# state spaces and other recurrences, alone and between attention layers
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
decoder("mamba", "Mamba", state_size=4)
decoder("mamba2", "Mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=4)
decoder("falcon_mamba", "FalconMamba", state_size=4)
decoder("rwkv", "Rwkv", context_length=32, attention_hidden_size=32)
decoder(
    "recurrent_gemma",
    "RecurrentGemma",
    num_hidden_layers=3,
    num_key_value_heads=2,
    lru_width=32,
    attention_window_size=8,
)
decoder("jamba", "Jamba", **GROUPED, num_experts=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False)  # fmt: skip
decoder("bamba", "Bamba", **GROUPED, **STATES, attn_layer_indices=[1])
decoder("zamba2", "Zamba2", n_mamba_heads=8, mamba_ngroups=1, mamba_d_state=8, chunk_size=4, hybrid_layer_ids=[1],
        num_hidden_layers=2, use_mem_rope=False, adapter_rank=8, layers_block_type=["mamba", "hybrid"])  # fmt: skip
decoder("qwen3_next", "Qwen3Next", **EXPERTS, num_experts=4, head_dim=8, shared_expert_intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"])  # fmt: skip
decoder("lfm2", "Lfm2", **GROUPED, layer_types=["conv", "full_attention"])
