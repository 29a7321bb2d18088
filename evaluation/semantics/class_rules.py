"""Rules that label modules by the names of their classes. The code under test never sees these names.

The rules cover classes of transformers, diffusers and torch, and of `plain_models`. If a library's name misleads
(`NoNorm`, GPT-2's `Conv1D`), the exception is beside the rule.
"""

from __future__ import annotations

import re

from torch import nn

_ATTENTION = re.compile(r"Attention|Attn")
_WHOLE = re.compile(r"(Layer|Block|Block\d?D|\dD|CrossAttn|Model|Encoder|Decoder|Stage|Pooler)$")
_BLOCK = re.compile(r"(Layer|Block)$")
_NORM = re.compile(r"(Norm|Norm\dd|NormGated|(?<!Pre)LayerNorm\w*|RMSNorm\w*|GroupNormActivation)$")
_MIXTURE = re.compile(r"(SparseMoeBlock|SparseMLP|Moe|MoE|MOE)$")
_RECURRENT = re.compile(
    r"(Mixer|Mamba2|^LSTM|^GRU|^RNN|RwkvSelfAttention|RecurrentBlock|GatedDeltaNet|LSTMCell|GRUCell|RNNCell"
    r"|HybridMambaLayer|LightningAttention|DeltaAttention|xLSTMLayer)$"
)
_MLP = re.compile(r"(MLP|Mlp|FeedForward|FeedForwardNetwork|PositionWiseFF|PerceptronTower)$")
_NOT_NORMS = {"NoNorm"}
_NOT_MIXERS = {"PatchTSMixer"}
_MIXTURES = {"GptOssMLP", "DbrxFFN"}
# They select attention heads. The paper counts them as mixtures of experts, under other names.
_CHOOSING_HEADS = {"JetMoeTopKGating"}
# They mix positions without softmax weights over keys.
_NOT_ATTENTION = {
    "RwkvSelfAttention",
    "KimiLinearDeltaAttention",
    "MiniMaxLightningAttention",
    "SwiftFormerEfficientAdditiveAttention",
    "PatchTSMixerGatedAttention",
    "AutoformerAttention",
    "BridgeTowerResidualAttention",  # a block with a network and norms
}
# Layers with several feed-forward networks, or with adapters beside one.
_SEVERAL_NETWORKS = {"LiltLayer", "MobileBertLayer", "PegasusXEncoderLayer", "XmodLayer"}
# One attention according to their papers, computed in several softmaxes or none.
_IN_PARTS = {
    "BigBirdAttention", "BigBirdPegasusEncoderAttention", "ConvBertAttention", "LEDEncoderAttention", "LongformerAttention",
    "NystromformerAttention", "PegasusXGlobalLocalAttention", "ReformerAttention", "YosoAttention",
}  # fmt: skip
# Feed-forward networks with unusual parts: a convolution, or attention's results beside the hidden layer.
_UNUSUAL = {"FluxSingleTransformerBlock", "GLPNLayer", "PvtV2BlockLayer", "SegformerLayer"}


def is_attention(module: nn.Module) -> bool:
    """Return True if the module is an attention layer and nothing else: projections, positions, norms and attention."""
    name = type(module).__name__
    return bool(_ATTENTION.search(name)) and not _WHOLE.search(name) and name not in _NOT_ATTENTION


def is_in_parts(module: nn.Module) -> bool:
    """Return True if the module is one attention that is computed in several softmaxes, or in none."""
    return type(module).__name__ in _IN_PARTS


def may_be_block(module: nn.Module) -> bool:
    """Return True if the class name contains "layer" or "block"."""
    name = type(module).__name__
    return bool(_BLOCK.search(name)) or name == "BridgeTowerResidualAttention"


def has_several_networks(block: nn.Module) -> bool:
    """Return True if the block has more than one feed-forward network."""
    return type(block).__name__ in _SEVERAL_NETWORKS


def is_norm(module: nn.Module) -> bool:
    """Return True if the module is a norm."""
    name = type(module).__name__
    return bool(_NORM.search(name)) and name not in _NOT_NORMS


def is_convolution(module: nn.Module) -> bool:
    """Return True if the module is one of torch's convolutions (GPT-2's `Conv1D` is a linear layer)."""
    return isinstance(module, nn.modules.conv._ConvNd)


def is_linear(module: nn.Module) -> bool:
    """Return True if the module is one product with a weight."""
    return isinstance(module, nn.Linear) or type(module).__name__ in {"Conv1D", "FalconLinear", "QuantLinear"}


def is_mixture(module: nn.Module) -> bool:
    """Return True if the module has a router that selects experts."""
    name = type(module).__name__
    return bool(_MIXTURE.search(name)) or name in _MIXTURES


def chooses_heads(module: nn.Module) -> bool:
    """Return True if the module selects attention heads, which may count as a mixture of experts."""
    return type(module).__name__ in _CHOOSING_HEADS


def is_recurrent(module: nn.Module) -> bool:
    """Return True if the module passes a state from position to position."""
    name = type(module).__name__
    return bool(_RECURRENT.search(name)) and not any(name.startswith(n) for n in _NOT_MIXERS)


def is_mlp(module: nn.Module) -> bool:
    """Return True if the class name is that of a feed-forward network."""
    return bool(_MLP.search(type(module).__name__))


def is_unusual(block: nn.Module) -> bool:
    """Return True if the block's feed-forward network is unique to its model, so that a pattern may miss it."""
    return type(block).__name__ in _UNUSUAL


def is_table(module: nn.Module) -> bool:
    """Return True if the module is an embedding."""
    return isinstance(module, nn.Embedding)


def is_bag(module: nn.Module) -> bool:
    """Return True if the module is an embedding bag."""
    return isinstance(module, nn.EmbeddingBag)


def is_interaction(module: nn.Module) -> bool:
    """Return True if the module is a feature interaction, by the class names of `plain_models`."""
    name = type(module).__name__
    return name.endswith("Interaction") or name in {"CrossLayer", "FactorizationMachine"}
