"""Hand-written torch modules that the classifier was not developed on: the smaller half of the part `blind`."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from evaluation.semantics.plain_models import FIELDS, PLAIN, ROWS, WIDTH, PerceptronTower, clicked, enter, plain, visits
from evaluation.semantics.plain_networks import Wrapped, with_loss
from evaluation.zoo.building import Inputs, numbers, words

__all__ = ["PLAIN"]

_VOCABULARY, _WIDTH, _HEADS, _LENGTH = 640, 32, 4, 16


class CausalSelfAttention(nn.Module):
    """Attention of a small GPT with its own mask, decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(_LENGTH, _LENGTH)).view(1, 1, _LENGTH, _LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, _HEADS, width // _HEADS).transpose(1, 2) for part in self.c_attn(x).split(width, 2)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        mixed = functional.softmax(scores, dim=-1) @ v
        return self.c_proj(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class MLP(nn.Module):
    """Feed-forward network: two linear layers with an activation."""

    def __init__(self, inside: int = 4 * _WIDTH, width: int = _WIDTH) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: type[nn.Module]) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(_WIDTH), attention, norm(_WIDTH), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SmallDecoder(nn.Module):
    """A small GPT: embeddings, blocks, logits."""

    def __init__(self, blocks: list[nn.Module], norm: nn.Module, places: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(_VOCABULARY, _WIDTH)
        self.wpe = nn.Embedding(_LENGTH, _WIDTH) if places else None
        self.h, self.ln_f = nn.ModuleList(blocks), norm
        self.lm_head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer that turns features into logits."""
        return self.lm_head

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.wte

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.wte(inputs)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.h:
            x = block(x)
        return with_loss(self.lm_head(self.ln_f(x)), labels)


def _written() -> Inputs:
    return {"inputs": words(), "labels": words(1)}


@plain("decoder")
def small_gpt() -> tuple[nn.Module, Inputs]:
    """Return a GPT of two hundred lines."""
    blocks: list[nn.Module] = [Block(CausalSelfAttention(), MLP(), nn.LayerNorm) for _ in range(2)]
    return SmallDecoder(blocks, nn.LayerNorm(_WIDTH), places=True), _written()


class RMSNorm(nn.Module):
    """As in LLaMA's reference code."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class RotaryAttention(nn.Module):
    """Attention with rotary embeddings as complex numbers, and grouped keys."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(_WIDTH, n, bias=False) for n in (_WIDTH, 16, 16, _WIDTH))
        angles = torch.outer(torch.arange(_LENGTH).float(), 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        cosines, sines = self.cosines[: x.shape[1], None], self.sines[: x.shape[1], None]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q = self._rotated(self.wq(x).view(batch, length, 4, 8)).transpose(1, 2)
        k = self._rotated(self.wk(x).view(batch, length, 2, 8)).transpose(1, 2).repeat_interleave(2, dim=1)
        v = self.wv(x).view(batch, length, 2, 8).transpose(1, 2).repeat_interleave(2, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, inside: int = 64) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(_WIDTH, inside, bias=False), nn.Linear(_WIDTH, inside, bias=False)
        self.w2 = nn.Linear(inside, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    """Mixture of experts in dense form: all four networks compute, the best two are weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(_WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(FeedForward(32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.gate(x), 2, dim=-1)
        weights = functional.softmax(weights, dim=-1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            share = (weights * (chosen == i)).sum(-1, keepdim=True)
            result = result + share * expert(x)
        return result


@plain("decoder")
def small_llama() -> tuple[nn.Module, Inputs]:
    """Return a small version of LLaMA's reference code."""
    blocks: list[nn.Module] = [Block(RotaryAttention(), FeedForward(), RMSNorm) for _ in range(2)]
    return SmallDecoder(blocks, RMSNorm(_WIDTH), places=False), _written()


@plain("decoder")
def small_mixture() -> tuple[nn.Module, Inputs]:
    """Return the same with experts."""
    blocks: list[nn.Module] = [Block(RotaryAttention(), MoE(), RMSNorm) for _ in range(2)]
    return SmallDecoder(blocks, RMSNorm(_WIDTH), places=False), _written()


class MixerBlock(nn.Module):
    """MLP-Mixer block: one network over positions, one over channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = MLP(24, places), MLP(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 8, 8)
        self.blocks = nn.Sequential(*(MixerBlock(16, 32) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.stem(inputs).flatten(2).transpose(1, 2))).mean(1))


def _seen() -> Inputs:
    return {"inputs": numbers(2, 3, 32, 32), "labels": torch.tensor([1, 2])}


enter("vision", "mlp_mixer", lambda: (Wrapped(Mixer()), _seen()))


class DenseLayer(nn.Module):
    """Norm and activation before each convolution; the result is concatenated to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, 16, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown = self.conv2(functional.relu(self.norm2(self.conv1(functional.relu(self.norm1(x))))))
        return torch.cat([x, grown], dim=1)


@plain("vision")
def densenet() -> tuple[nn.Module, Inputs]:
    """Return DenseNet."""
    layers = [nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    dense = [DenseLayer(16 + 8 * i) for i in range(3)]
    end = [nn.BatchNorm2d(40), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 5)]
    return Wrapped(nn.Sequential(*layers, *dense, *end)), _seen()


class SqueezeExcitation(nn.Module):
    """Channels scaled by a function of all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = functional.silu(self.fc1(functional.adaptive_avg_pool2d(x, 1)))
        return x * self.fc2(scale).sigmoid()


class Inverted(nn.Module):
    """Inverted residual (MBConv): expand, depthwise convolution, squeeze-and-excitation, project."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            SqueezeExcitation(wide), nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


@plain("vision")
def inverted_residuals() -> tuple[nn.Module, Inputs]:
    """Return a network of EfficientNet's blocks."""
    stem = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU()]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5)]
    return Wrapped(nn.Sequential(*stem, Inverted(8), Inverted(8), *end)), _seen()


class WavenetLayer(nn.Module):
    """Gated convolution with growing dilation."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.filter, self.gate = (nn.Conv1d(8, 8, 2, dilation=dilation) for _ in range(2))
        self.skip, self.residual = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 1)
        self.dilation = dilation

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padded = functional.pad(x, (self.dilation, 0))
        z = self.filter(padded).tanh() * self.gate(padded).sigmoid()
        return x + self.residual(z), self.skip(z)


class Wavenet(nn.Module):
    """WaveNet: audio to the next sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.layers = nn.ModuleList(WavenetLayer(2**i) for i in range(3))
        self.last1, self.last2 = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x, total = self.first(inputs), torch.zeros(())
        skips = []
        for layer in self.layers:
            x, skip = layer(x)
            skips.append(skip)
        total = torch.stack(skips).sum(0)
        return self.last2(functional.relu(self.last1(functional.relu(total)))).transpose(1, 2)


@plain("audio")
def wavenet() -> tuple[nn.Module, Inputs]:
    """Return WaveNet."""
    labels = torch.arange(2 * 1600).view(2, 1600) % 16
    return Wrapped(Wavenet()), {"inputs": numbers(2, 1, 1600), "labels": labels}


class InteractingAttention(nn.Module):
    """Self-attention over features (AutoInt)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.residual = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.attention(x, x, x, need_weights=False)[0] + self.residual(x))


class AutoInt(nn.Module):
    """AutoInt: self-attention over the rows of many tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(FIELDS))
        self.layers = nn.Sequential(InteractingAttention(), InteractingAttention())
        self.deep = PerceptronTower(FIELDS * WIDTH, 16, 1)
        self.score = nn.Linear(FIELDS * WIDTH, 1)

    def forward(self, fields: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        features = torch.stack([table(fields[:, i]) for i, table in enumerate(self.tables)], dim=1)
        return clicked(self.score(self.layers(features).flatten(1)) + self.deep(features.flatten(1)), labels)


enter("recommender", "autoint", lambda: (AutoInt(), visits(dense=False)))


class Residual(nn.Module):
    """Two convolutions, with the timestep added between."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, one), nn.Conv2d(one, other, 3, padding=1)
        self.time = nn.Linear(32, other)
        self.norm2, self.conv2 = nn.GroupNorm(4, other), nn.Conv2d(other, other, 3, padding=1)
        self.shortcut = nn.Conv2d(one, other, 1) if one != other else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.conv2(functional.silu(self.norm2(h))) + self.shortcut(x)


class Denoiser(nn.Module):
    """Denoiser of DDPM, with a timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.time_mlp = PerceptronTower(16, 32, 32)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down, self.middle, self.up = Residual(8, 16), Residual(16, 16), Residual(24, 8)
        self.shrink, self.grow = nn.Conv2d(16, 16, 3, 2, 1), nn.ConvTranspose2d(16, 16, 4, 2, 1)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> dict[str, torch.Tensor]:
        rates = torch.exp(-math.log(10000) * torch.arange(8, device=sample.device) / 8)
        angles = timestep[:, None].float() * rates[None]
        time = self.time_mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))
        first = self.first(sample)
        inside = self.middle(self.shrink(self.down(first, time)), time)
        return {"sample": self.last(self.up(torch.cat([self.grow(inside), first], dim=1), time))}


enter(
    "diffusion",
    "small_denoiser",
    lambda: (Denoiser(), {"sample": numbers(2, 3, 16, 16), "timestep": torch.tensor([3, 7])}),
)


class Policy(nn.Module):
    """Action and value for four images (A2C)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 8, 8, 4),
            nn.ReLU(),
            nn.Conv2d(8, 16, 4, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 32),
            nn.ReLU(),
        )
        self.act, self.value = nn.Linear(32, 6), nn.Linear(32, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        state = self.body(inputs)
        return with_loss(self.act(state), labels) | {"value": self.value(state)}


enter("vision", "policy", lambda: (Policy(), {"inputs": numbers(2, 4, 40, 40), "labels": torch.tensor([1, 2])}))
