"""Models of audio."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evaluation.zoo.building import SIZES, TEXT, Inputs, architecture, numbers, pretrained, row, words

WAVES = SIZES | {
    "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "vocab_size": 32, "mask_time_prob": 0.0, "pad_token_id": 0,
    "num_feat_extract_layers": 2, "ctc_zero_infinity": True, "layerdrop": 0.0,
}  # fmt: skip


def listener(module: str, prefix: str, **settings: Any) -> None:
    """Add an entry that transcribes speech by CTC."""
    row("audio", module, prefix, "ForCTC", heard, **(WAVES | settings))


def heard() -> Inputs:
    """Return two audio clips with their transcripts."""
    return {"input_values": numbers(2, 1600), "labels": words(1, 5) % 29 + 1}


listener("wav2vec2", "Wav2Vec2")
listener("hubert", "Hubert")
listener("wavlm", "WavLM", num_ctc_classes=32)
listener("unispeech", "UniSpeech")
listener("unispeech_sat", "UniSpeechSat")
listener("sew", "SEW", squeeze_factor=2)
listener("wav2vec2_conformer", "Wav2Vec2Conformer", conv_depthwise_kernel_size=5)
row("audio", "audio_spectrogram_transformer", "AST", "ForAudioClassification",
    lambda: {"input_values": numbers(2, 32, 16), "labels": torch.tensor([1, 0])}, **SIZES, patch_size=4, max_length=32,
    num_mel_bins=16, frequency_stride=4, time_stride=4, num_labels=3)  # fmt: skip
row("audio", "encodec", "Encodec", "Model", lambda: {"input_values": numbers(1, 1, 320)}, num_filters=4, hidden_size=16,
    codebook_size=16, upsampling_ratios=[4, 2], num_lstm_layers=1, sampling_rate=1000, target_bandwidths=[1.5])  # fmt: skip
row("audio", "univnet", "UnivNet", "Model", lambda: {"input_features": numbers(1, 8, 16), "noise_sequence": numbers(1, 8, 8)},
    model_in_channels=8, model_hidden_channels=8, num_mel_bins=16, resblock_kernel_sizes=[3], resblock_stride_sizes=[4],
    resblock_dilation_sizes=[[1, 3]], kernel_predictor_hidden_channels=8)  # fmt: skip
SPEECH = {
    "encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "vocab_size": 99, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 32,
    "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
row("audio", "whisper", "Whisper", "ForConditionalGeneration", writes=True,
    inputs=lambda: {"input_features": numbers(2, 16, 64), "labels": words(1)}, **SPEECH, num_mel_bins=16)  # fmt: skip
row("audio", "speech_to_text", "Speech2Text", "ForConditionalGeneration", writes=True,
    inputs=lambda: {"input_features": numbers(2, 32, 16), "labels": words(1)}, **SPEECH, input_feat_per_channel=16,
    conv_channels=16, num_conv_layers=1, conv_kernel_sizes=[3])  # fmt: skip
row("audio", "moonshine", "Moonshine", "ForConditionalGeneration", writes=True,
    inputs=lambda: {"input_values": numbers(2, 2000), "labels": words(1)},
    hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, vocab_size=99,
    encoder_num_attention_heads=4, decoder_num_attention_heads=4, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1,
    eos_token_id=2)  # fmt: skip
row("audio", "vits", "Vits", "Model", lambda: {"input_ids": words(length=6), "attention_mask": torch.ones(2, 6).long()},
    vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, flow_size=16,
    spectrogram_bins=17, prior_encoder_num_flows=1, prior_encoder_num_wavenet_layers=1, duration_predictor_num_flows=2,
    upsample_initial_channel=16, upsample_rates=[4, 2], upsample_kernel_sizes=[8, 4], resblock_kernel_sizes=[3],
    resblock_dilation_sizes=[[1, 3]], posterior_encoder_num_wavenet_layers=1, depth_separable_num_layers=1,
    use_stochastic_duration_prediction=False, layerdrop=0.0)  # fmt: skip
row("audio", "speecht5", "SpeechT5", "ForSpeechToText", lambda: {"input_values": numbers(2, 1600), "labels": words(1)},
    vocab_size=99, hidden_size=32, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=64, decoder_layers=1,
    decoder_attention_heads=4, decoder_ffn_dim=64, conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8),
    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0, max_text_positions=32,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, num_feat_extract_layers=2,
    encoder_layerdrop=0.0, decoder_layerdrop=0.0)  # fmt: skip


@architecture("audio")
def clap() -> tuple[nn.Module, Inputs]:
    """Return CLAP: audio and text in one space."""
    tower = {"spec_size": 64, "num_mel_bins": 16, "patch_embeds_hidden_size": 16, "hidden_size": 32, "depths": [1, 1],
             "num_attention_heads": [2, 2], "window_size": 4, "num_hidden_layers": 2, "patch_stride": [4, 4]}  # fmt: skip
    settings = {"text_config": TEXT | {"max_position_embeddings": 40, "projection_dim": 16},
                "audio_config": tower | {"projection_dim": 16}, "projection_dim": 16}  # fmt: skip
    model = pretrained("clap", "ClapModel", "ClapConfig", **settings)
    return model, {"input_ids": words(), "input_features": numbers(2, 1, 256, 16), "return_loss": True}


@architecture("audio")
def musicgen_decoder() -> tuple[nn.Module, Inputs]:
    """Return a decoder of four code streams, from which a codec makes music."""
    model = pretrained(
        "musicgen", "MusicgenForCausalLM", "MusicgenDecoderConfig", vocab_size=99, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=64, num_codebooks=4, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    return model, {"input_ids": torch.cat([words(i) for i in range(4)]), "use_cache": False}
