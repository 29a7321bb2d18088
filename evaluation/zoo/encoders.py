"""Encoders of text, and sequence-to-sequence models."""

from __future__ import annotations

from typing import Any

import torch

from evaluation.zoo.building import TEXT, padded_text, row, text, words

TRANSLATOR = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip


def encoder(module: str, prefix: str, head: str = "ForMaskedLM", **settings: Any) -> None:
    """Add an entry for masked language modelling."""
    row("encoder", module, prefix, head, padded_text, **(TEXT | settings))


def translator(module: str, prefix: str, head: str = "ForConditionalGeneration", **settings: Any) -> None:
    """Add an entry with an encoder and a decoder."""
    row("encoder-decoder", module, prefix, head, padded_text, writes=True, **(TRANSLATOR | settings))


encoder("bert", "Bert")
encoder("roberta", "Roberta", max_position_embeddings=40)
encoder("xlm_roberta", "XLMRoberta", max_position_embeddings=40)
encoder("camembert", "Camembert", max_position_embeddings=40)
encoder("distilbert", "DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=64)
encoder("albert", "Albert", embedding_size=16)
encoder("electra", "Electra", embedding_size=16)
encoder("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"])
encoder("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)
encoder("mpnet", "MPNet")
encoder("modernbert", "ModernBert", local_attention=4, cls_token_id=1, sep_token_id=2)
encoder("longformer", "Longformer", attention_window=4, max_position_embeddings=40)
encoder("big_bird", "BigBird", attention_type="original_full")
encoder("convbert", "ConvBert", embedding_size=16)
encoder("roformer", "RoFormer", embedding_size=16)
encoder("squeezebert", "SqueezeBert", embedding_size=32)
encoder("mobilebert", "MobileBert", embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=1)
encoder("rembert", "RemBert", input_embedding_size=16, output_embedding_size=16)
encoder("ernie", "Ernie")
encoder("esm", "Esm", position_embedding_type="rotary", mask_token_id=3)
encoder("nystromformer", "Nystromformer", num_landmarks=4, segment_means_seq_len=4)
row("encoder", "fnet", "FNet", "ForMaskedLM", text, **TEXT)
row("encoder", "canine", "Canine", "Model", lambda: {"input_ids": words(length=32)}, **TEXT, local_transformer_stride=8,
    num_hash_buckets=32, downsampling_rate=4)  # fmt: skip
row("encoder", "funnel", "Funnel", "ForMaskedLM", padded_text, vocab_size=99, block_sizes=[1, 1], d_model=32, n_head=4,
    d_head=8, d_inner=64)  # fmt: skip
row("encoder", "perceiver", "Perceiver", "ForMaskedLM", lambda: {"inputs": words(), "labels": words(1)}, vocab_size=99,
    d_model=32, num_latents=8, d_latents=32, num_self_attends_per_block=1, num_self_attention_heads=4,
    num_cross_attention_heads=4, max_position_embeddings=10)  # fmt: skip
row("encoder", "reformer", "Reformer", "ModelWithLMHead",
    lambda: {"input_ids": words(length=16), "labels": words(1, 16)}, vocab_size=99, hidden_size=32, num_attention_heads=4,
    attention_head_size=8, attn_layers=["local", "lsh"], feed_forward_size=64, axial_pos_shape=[4, 4], is_decoder=True,
    axial_pos_embds_dim=[16, 16], local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_buckets=4, hash_seed=0,
    hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
    max_position_embeddings=32)  # fmt: skip
row("encoder", "tapas", "Tapas", "Model", lambda: {"input_ids": words(), "token_type_ids": torch.zeros(2, 10, 7).long()},
    **TEXT)  # fmt: skip
row("encoder", "layoutlm", "LayoutLM", "ForMaskedLM", lambda: padded_text() | {"bbox": torch.tensor([10, 20, 30, 40]).expand(2, 10, 4)},
    **TEXT)  # fmt: skip

T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
row("encoder-decoder", "t5", "T5", "ForConditionalGeneration", padded_text, writes=True, **T5)
row(
    "encoder-decoder",
    "mt5",
    "MT5",
    "ForConditionalGeneration",
    padded_text,
    writes=True,
    **T5,
    feed_forward_proj="gated-gelu",
)
row("encoder-decoder", "umt5", "UMT5", "ForConditionalGeneration", padded_text, writes=True, **T5)
row("encoder-decoder", "longt5", "LongT5", "ForConditionalGeneration", padded_text, writes=True, **T5, local_radius=3,
    encoder_attention_type="transient-global", global_block_size=4)  # fmt: skip
row("encoder-decoder", "switch_transformers", "SwitchTransformers", "ForConditionalGeneration", padded_text, **T5,
    num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=8)  # fmt: skip
translator("bart", "Bart")
translator("mbart", "MBart")
translator("pegasus", "Pegasus")
translator("pegasus_x", "PegasusX", block_size=4, num_global_tokens=2)
translator("blenderbot", "Blenderbot")
translator("m2m_100", "M2M100")
translator("marian", "Marian", head="MTModel")
translator("led", "LED", attention_window=4, max_encoder_position_embeddings=32, max_decoder_position_embeddings=32)
translator("plbart", "PLBart")
translator("bigbird_pegasus", "BigBirdPegasus", attention_type="original_full")
translator("nllb_moe", "NllbMoe", num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=8)
