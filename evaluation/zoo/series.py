"""Models of time series, videos and decisions, and plain recurrent networks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from evaluation.zoo.building import SIZES, VISION, Inputs, architecture, numbers, pretrained, row, text

SERIES = {"context_length": 16, "prediction_length": 4, "num_input_channels": 3}


def forecast() -> Inputs:
    """Return three series with their continuations."""
    return {"past_values": numbers(2, 16, 3), "future_values": numbers(2, 4, 3, seed=1)}


row("series", "patchtst", "PatchTST", "ForPrediction", forecast, **SERIES, patch_length=4, patch_stride=4, d_model=16,
    num_hidden_layers=2, num_attention_heads=4, ffn_dim=32)  # fmt: skip
row("series", "patchtsmixer", "PatchTSMixer", "ForPrediction", forecast, **SERIES, patch_length=4, patch_stride=4, d_model=16,
    num_layers=2)  # fmt: skip
STEPS = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16,
         "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
         "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}  # fmt: skip


def steps() -> Inputs:
    """Return a series with its times and observation mask."""
    return {
        "past_values": numbers(2, 10), "past_time_features": numbers(2, 10, 1), "past_observed_mask": torch.ones(2, 10),
        "future_values": numbers(2, 4, seed=1), "future_time_features": numbers(2, 4, 1),
    }  # fmt: skip


row("series", "time_series_transformer", "TimeSeriesTransformer", "ForPrediction", steps, **STEPS)
row("series", "informer", "Informer", "ForPrediction", steps, **STEPS, dropout=0.0, attention_dropout=0.0,
    activation_dropout=0.0)  # fmt: skip  # the model draws on the CPU, too: locally from the same random state, remotely from a second one


def film() -> Inputs:
    """Return two videos of four images."""
    return {"pixel_values": numbers(2, 4, 3, 32, 32), "labels": torch.tensor([1, 2])}


row("film", "timesformer", "Timesformer", "ForVideoClassification", film, **VISION, num_frames=4, num_labels=5)
row(
    "film",
    "vivit",
    "Vivit",
    "ForVideoClassification",
    film,
    **VISION,
    num_frames=4,
    tubelet_size=[2, 8, 8],
    num_labels=5,
)
row("film", "videomae", "VideoMAE", "ForVideoClassification", film, **VISION, num_frames=4, num_labels=5)
row("film", "vjepa2", "VJEPA2", "Model", lambda: {"pixel_values_videos": numbers(1, 4, 3, 32, 32)}, **SIZES, crop_size=32,
    patch_size=8, frames_per_clip=4, mlp_ratio=2.0, pred_hidden_size=32, pred_num_hidden_layers=1,
    pred_num_attention_heads=4)  # fmt: skip


@architecture("decisions")
def decision_transformer() -> tuple[nn.Module, Inputs]:
    """Return a decision transformer, which predicts the next action from past actions, states and rewards."""
    model = pretrained(
        "decision_transformer", "DecisionTransformerModel", "DecisionTransformerConfig", state_dim=5, act_dim=3,
        hidden_size=32, max_ep_len=16, n_layer=2, n_head=4, n_positions=32,
    )  # fmt: skip
    times = torch.arange(6).expand(2, 6)
    visited = {"states": numbers(2, 6, 5), "actions": numbers(2, 6, 3), "rewards": numbers(2, 6, 1)}
    return model, visited | {"returns_to_go": numbers(2, 6, 1), "timesteps": times, "attention_mask": torch.ones(2, 6)}


class Recurrent(nn.Module):
    """A word tagger, which packs sequences if lengths are given."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, 16)
        self.layers = kind(16, 24, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 99)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, lengths: list[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return loss and logits."""
        inputs = self.embedding(input_ids)
        if lengths is not None:
            inputs = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.layers(inputs)
        if lengths is not None:
            states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True)
        logits = self.head(states)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@architecture("recurrent")
def lstm() -> tuple[nn.Module, Inputs]:
    """Return LSTM."""
    return Recurrent(nn.LSTM), text()


@architecture("recurrent")
def gru() -> tuple[nn.Module, Inputs]:
    """Return GRU."""
    return Recurrent(nn.GRU), text()


@architecture("recurrent")
def packed_lstm() -> tuple[nn.Module, Inputs]:
    """Return an LSTM over sequences of different lengths."""
    return Recurrent(nn.LSTM), text() | {"lengths": [7, 10]}
