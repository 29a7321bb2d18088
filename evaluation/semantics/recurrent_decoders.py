"""Decoders of transformers with recurrent layers, some mixed with attention layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from evaluation.semantics.plain_models import PLAIN
from evaluation.zoo import building
from evaluation.zoo.building import TEXT, Architecture, Inputs, text

_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def _decoder(module: str, prefix: str, config: str = "", **settings: Any) -> None:
    def make() -> tuple[nn.Module, Inputs]:
        name = config or f"{prefix}Config"
        return building.pretrained(module, f"{prefix}ForCausalLM", name, **(TEXT | settings)), text()

    PLAIN[module] = Architecture(module, "decoder", make, writes=True)


_decoder("xlstm", "xLSTM", hidden_size=128, num_heads=2, num_blocks=2, chunk_size=4)
_decoder("falcon_h1", "FalconH1", **_GROUPED, **_STATES, mamba_d_ssm=64)
_decoder("nemotron_h", "NemotronH", **_GROUPED, layers_block_type=["mamba", "attention"], mamba_num_heads=8,
         mamba_head_dim=8, n_groups=2, ssm_state_size=8, chunk_size=4)  # fmt: skip
_decoder(
    "olmo_hybrid", "OlmoHybrid", num_key_value_heads=2, **_LINEAR, layer_types=["linear_attention", "full_attention"]
)
_decoder("minimax", "MiniMax", **_GROUPED, num_local_experts=4, layer_types=["linear_attention", "full_attention"],
         block_size=4)  # fmt: skip
_decoder("kimi_linear", "KimiLinear", kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
         moe_intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, n_shared_experts=1, linear_head_dim=8,
         linear_num_heads=4, layer_types=["linear_attention", "full_attention"])  # fmt: skip
_decoder("qwen3_5", "Qwen3_5", "Qwen3_5TextConfig", **_GROUPED, **_LINEAR,
         layer_types=["linear_attention", "full_attention"])  # fmt: skip
_decoder("granitemoehybrid", "GraniteMoeHybrid", num_key_value_heads=2, **_STATES, num_local_experts=4,
         num_experts_per_tok=2, layer_types=["mamba", "attention"], shared_intermediate_size=32)  # fmt: skip
