"""Linear recurrences: state spaces, linear attention, gated units; and similar models without recurrence.

A class whose name ends with `Recurrence` is exactly one recurrence.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from evaluation.semantics.plain_models import plain
from evaluation.semantics.plain_networks import Tagger, Wrapped
from evaluation.zoo.building import Inputs, numbers, words

TAKEN = 32
WIDTH = 16


def _tags(layers: nn.Module) -> tuple[nn.Module, Inputs]:
    return Tagger(layers, WIDTH), {"inputs": words(length=6), "labels": words(1, 6) % 5}


class QuasiRecurrence(nn.Module):
    """QRNN: convolutional gates and a pooled state."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv1d(TAKEN, 3 * WIDTH, 2, padding=1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gates = self.gates(inputs.transpose(1, 2))[..., : inputs.shape[1]].transpose(1, 2)
        z, f, o = gates.chunk(3, -1)
        z, f, o = z.tanh(), f.sigmoid(), o.sigmoid()
        state, states = torch.zeros_like(z[:, 0]), []
        for t in range(z.shape[1]):
            state = f[:, t] * state + (1 - f[:, t]) * z[:, t]
            states.append(state)
        return o * torch.stack(states, 1)


@plain("encoder")
def quasi_recurrent() -> tuple[nn.Module, Inputs]:
    """Return QRNN."""
    return _tags(QuasiRecurrence())


class SimpleRecurrence(nn.Module):
    """SRU: input-only gates and a highway connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(TAKEN, 4 * WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        new, forget, reset, around = self.layer(inputs).chunk(4, -1)
        forget, reset = torch.sigmoid(forget), torch.sigmoid(reset)
        state, states = inputs.new_zeros(inputs.shape[0], WIDTH), []
        for t in range(inputs.shape[1]):
            state = forget[:, t] * state + (1 - forget[:, t]) * new[:, t]
            states.append(reset[:, t] * torch.tanh(state) + (1 - reset[:, t]) * around[:, t])
        return torch.stack(states, dim=1)


@plain("encoder")
def simple_recurrent_unit() -> tuple[nn.Module, Inputs]:
    """Return SRU."""
    return _tags(SimpleRecurrence())


class ParallelGRURecurrence(nn.Module):
    """minGRU: all positions at once, in logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.update, self.new = nn.Linear(TAKEN, WIDTH), nn.Linear(TAKEN, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gate, new = self.update(inputs), self.new(inputs)
        kept = -functional.softplus(gate)
        added = -functional.softplus(-gate) + torch.where(
            new >= 0, (functional.relu(new) + 0.5).log(), -functional.softplus(-new)
        )
        decay = kept.cumsum(1)
        return torch.exp(decay + torch.logcumsumexp(added - decay, dim=1))


@plain("encoder")
def min_gru() -> tuple[nn.Module, Inputs]:
    """Return minGRU."""
    return _tags(ParallelGRURecurrence())


class ConvolvedRecurrence(nn.Module):
    """S4D: a diagonal state space as a long convolution by FFT."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.take = nn.Linear(TAKEN, WIDTH)
        self.log_step = nn.Parameter(torch.rand(WIDTH) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.log_real = nn.Parameter(torch.log(0.5 * torch.ones(WIDTH, states)))
        self.imaginary = nn.Parameter(math.pi * torch.arange(states).repeat(WIDTH, 1).float())
        self.out = nn.Parameter(torch.randn(WIDTH, states, 2))
        self.around = nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        taken = self.take(inputs).transpose(1, 2)
        length = taken.shape[-1]
        matrix = torch.complex(-torch.exp(self.log_real), self.imaginary)
        stepped = matrix * torch.exp(self.log_step).unsqueeze(-1)
        powers = torch.exp(stepped.unsqueeze(-1) * torch.arange(length, device=inputs.device))
        weights = torch.view_as_complex(self.out) * (torch.exp(stepped) - 1.0) / matrix
        kernel = 2 * torch.einsum("hn,hnl->hl", weights, powers).real
        spectrum = torch.fft.rfft(taken, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        mixed = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        return (mixed + taken * self.around.unsqueeze(-1)).transpose(1, 2)


@plain("encoder")
def s4d() -> tuple[nn.Module, Inputs]:
    """Return S4D."""
    return _tags(ConvolvedRecurrence())


class DiagonalRecurrence(nn.Module):
    """S5: a diagonal state space, step by step."""

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.log_matrix, self.log_step = nn.Parameter(torch.randn(states)), nn.Parameter(torch.randn(states) - 3)
        self.enter, self.leave = nn.Linear(TAKEN, states, bias=False), nn.Linear(states, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        matrix, step = -torch.exp(self.log_matrix), torch.exp(self.log_step)
        decay, entered = torch.exp(matrix * step), self.enter(inputs) * step
        state, states = torch.zeros_like(entered[:, 0]), []
        for t in range(inputs.shape[1]):
            state = decay * state + entered[:, t]
            states.append(state)
        return self.leave(torch.stack(states, 1))


@plain("encoder")
def s5() -> tuple[nn.Module, Inputs]:
    """Return S5."""
    return _tags(DiagonalRecurrence())


class LinearUnitRecurrence(nn.Module):
    """LRU: a linear recurrent unit with complex states."""

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.log_size, self.log_angle = nn.Parameter(torch.rand(states)), nn.Parameter(torch.rand(states))
        self.enter, self.leave = nn.Linear(TAKEN, 2 * states), nn.Linear(2 * states, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        size, angle = torch.exp(-torch.exp(self.log_size)), torch.exp(self.log_angle)
        real, imaginary = size * torch.cos(angle), size * torch.sin(angle)
        new_real, new_imaginary = self.enter(inputs).chunk(2, -1)
        a = b = torch.zeros_like(new_real[:, 0])
        states = []
        for t in range(inputs.shape[1]):
            a, b = real * a - imaginary * b + new_real[:, t], imaginary * a + real * b + new_imaginary[:, t]
            states.append(torch.cat([a, b], -1))
        return self.leave(torch.stack(states, 1))


@plain("encoder")
def linear_recurrent_unit() -> tuple[nn.Module, Inputs]:
    """Return LRU."""
    return _tags(LinearUnitRecurrence())


class MatrixRecurrence(nn.Module):
    """A persistent matrix of keys and values: gated linear attention, delta rule, or retention."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.queries, self.keys, self.values = (nn.Linear(TAKEN, WIDTH, bias=False) for _ in range(3))
        self.gate, self.rate = nn.Linear(TAKEN, WIDTH), nn.Linear(TAKEN, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = self.queries(inputs), functional.normalize(self.keys(inputs), dim=-1), self.values(inputs)
        if self.rule == "gated":
            decay = (functional.logsigmoid(self.gate(inputs)) / 16).exp()
        rate = self.rate(inputs).sigmoid() if self.rule == "delta" else None
        state, results = inputs.new_zeros(inputs.shape[0], WIDTH, WIDTH), []
        for t in range(inputs.shape[1]):
            k, v = key[:, t].unsqueeze(-1), value[:, t].unsqueeze(-2)
            if self.rule == "delta":
                v = (v - k.transpose(-1, -2) @ state) * rate[:, t].unsqueeze(-1)
                state = state + k * v
            else:
                state = (decay[:, t].unsqueeze(-1) if self.rule == "gated" else 0.97) * state + k * v
            results.append((query[:, t].unsqueeze(-2) @ state).squeeze(-2))
        return torch.stack(results, 1)


@plain("encoder")
def delta_net() -> tuple[nn.Module, Inputs]:
    """Return DeltaNet."""
    return _tags(MatrixRecurrence("delta"))


@plain("encoder")
def gated_linear_attention() -> tuple[nn.Module, Inputs]:
    """Return GLA."""
    return _tags(MatrixRecurrence("gated"))


@plain("encoder")
def retention() -> tuple[nn.Module, Inputs]:
    """Return RetNet, step by step."""
    return _tags(MatrixRecurrence("kept"))


class SummedRecurrence(nn.Module):
    """Causal linear attention: cumulative sums of keys times values."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(TAKEN, WIDTH) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key = functional.elu(self.queries(inputs)) + 1, functional.elu(self.keys(inputs)) + 1
        pairs = torch.einsum("bld,blm->bldm", key, self.values(inputs)).cumsum(1)
        total = (query * key.cumsum(1)).sum(-1, keepdim=True)
        return torch.einsum("bld,bldm->blm", query, pairs) / (total + 1e-6)


@plain("encoder")
def causal_linear_attention() -> tuple[nn.Module, Inputs]:
    """Return causal linear attention."""
    return _tags(SummedRecurrence())


class BoundedRecurrence(nn.Module):
    """HGRN: gates with a lower bound."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bound = nn.Linear(TAKEN, 3 * WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        new, forget, out = self.layer(inputs).chunk(3, -1)
        low = self.bound.sigmoid()
        forget = low + (1 - low) * forget.sigmoid()
        new = functional.silu(new) * (1 - forget)
        state, states = torch.zeros_like(new[:, 0]), []
        for t in range(inputs.shape[1]):
            state = forget[:, t] * state + new[:, t]
            states.append(state)
        return torch.stack(states, 1) * out.sigmoid()


@plain("encoder")
def hgrn() -> tuple[nn.Module, Inputs]:
    """Return HGRN."""
    return _tags(BoundedRecurrence())


class SelectiveRecurrence(nn.Module):
    """Mamba: a selective state space in its plainest form."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.enter, self.select = nn.Linear(TAKEN, 2 * WIDTH), nn.Linear(WIDTH, 2 * states + 1)
        self.step = nn.Linear(1, WIDTH)
        self.log_matrix = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(WIDTH, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        taken, gate = self.enter(inputs).chunk(2, -1)
        taken = functional.silu(taken)
        step, b, c = self.select(taken).split([1, self.log_matrix.shape[1], self.log_matrix.shape[1]], -1)
        step = functional.softplus(self.step(step))
        decay = torch.exp(torch.einsum("bld,dn->bldn", step, -torch.exp(self.log_matrix)))
        added = torch.einsum("bld,bln,bld->bldn", step, b, taken)
        state, results = torch.zeros_like(added[:, 0]), []
        for t in range(inputs.shape[1]):
            state = decay[:, t] * state + added[:, t]
            results.append(torch.einsum("bdn,bn->bd", state, c[:, t]))
        return torch.stack(results, 1) * functional.silu(gate)


@plain("encoder")
def written_mamba() -> tuple[nn.Module, Inputs]:
    """Return Mamba."""
    return _tags(SelectiveRecurrence())


class WeightedRecurrence(nn.Module):
    """RWKV: sums weighted by keys that decay with time, without a stabiliser."""

    def __init__(self) -> None:
        super().__init__()
        self.receive, self.keys, self.values = (nn.Linear(TAKEN, WIDTH, bias=False) for _ in range(3))
        self.decay, self.first = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        received, key, value = self.receive(inputs).sigmoid(), self.keys(inputs).exp(), self.values(inputs)
        fade = torch.exp(-torch.exp(self.decay))
        above = below = torch.zeros_like(value[:, 0])
        results = []
        for t in range(inputs.shape[1]):
            now = key[:, t] * self.first.exp()
            results.append((above + now * value[:, t]) / (below + now))
            above, below = fade * above + key[:, t] * value[:, t], fade * below + key[:, t]
        return received * torch.stack(results, 1)


@plain("encoder")
def written_rwkv() -> tuple[nn.Module, Inputs]:
    """Return RWKV."""
    return _tags(WeightedRecurrence())


class Highway(nn.Module):
    """A highway layer: gates between a layer and its bypass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=True):
            gated = torch.sigmoid(gate(inputs))
            inputs = gated * torch.relu(layer(inputs)) + (1 - gated) * inputs
        return inputs


@plain("generic")
def highway() -> tuple[nn.Module, Inputs]:
    """Return a highway network."""
    return Wrapped(Highway()), {"inputs": numbers(4, 8), "labels": numbers(4, 8, seed=1)}


class Parts(nn.Module):
    """Res2Net: each channel group through its own convolution, added to the next group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result, results = torch.zeros_like(inputs[:, :4]), []
        for part, layer in zip(inputs.chunk(4, 1), self.layers, strict=True):
            result = torch.relu(layer(part + result))
            results.append(result)
        return torch.cat(results, 1)


@plain("vision")
def res2net() -> tuple[nn.Module, Inputs]:
    """Return Res2Net."""
    network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Parts(), nn.Conv2d(16, 3, 1))
    return Wrapped(network), {"inputs": numbers(2, 3, 16, 16), "labels": numbers(2, 3, 16, 16, seed=1)}


class Coupling(nn.Module):
    """RealNVP coupling: half of the numbers scaled and shifted by a function of the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 8) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            left, right = inputs.chunk(2, -1)
            stretch, shift = layer(left).chunk(2, -1)
            inputs = torch.cat([right * stretch.tanh().exp() + shift, left], -1)
        return inputs


@plain("generic")
def affine_coupling() -> tuple[nn.Module, Inputs]:
    """Return a normalising flow."""
    return Wrapped(Coupling()), {"inputs": numbers(4, 8), "labels": numbers(4, 8, seed=1)}


class Universal(nn.Module):
    """One transformer layer, applied repeatedly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(TAKEN, 4, 64, batch_first=True)
        self.out = nn.Linear(TAKEN, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            inputs = self.layer(inputs)
        return self.out(inputs)


@plain("encoder")
def universal_transformer() -> tuple[nn.Module, Inputs]:
    """Return a universal transformer."""
    return _tags(Universal())
