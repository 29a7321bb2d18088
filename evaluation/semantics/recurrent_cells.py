"""Recurrences whose steps are Python: cells of PyTorch and cells that are written out, in loops. Labels come from classes.

A class whose name ends with `Recurrence` holds one recurrence and nothing else.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from evaluation.semantics.plain_models import plain
from evaluation.semantics.plain_networks import WORDS, Tagger, Wrapped, with_loss
from evaluation.zoo.building import Inputs, numbers, words

WIDTH = 16


def tagged(length: int = 6) -> Inputs:
    """Words, with a class for each."""
    return {"inputs": words(length=length), "labels": words(1, length) % 5}


def series() -> Inputs:
    """Two series of six vectors, and where each goes next."""
    return {"inputs": numbers(2, 6, 8), "labels": numbers(2, 3, seed=1)}


class Last(nn.Module):
    """The last state of a recurrence through a layer."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(inputs)[:, -1])


class LoopOfCells(nn.Module):
    """PyTorch's cell, step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        state, states = None, []
        for step in inputs.unbind(1):
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)


@plain("encoder")
def lstm_cells() -> tuple[nn.Module, Inputs]:
    """`nn.LSTMCell` in a loop."""
    return Tagger(LoopOfCells(nn.LSTMCell(32, WIDTH)), WIDTH), tagged()


@plain("encoder")
def gru_cells() -> tuple[nn.Module, Inputs]:
    """`nn.GRUCell` in a loop."""
    return Tagger(LoopOfCells(nn.GRUCell(32, WIDTH)), WIDTH), tagged()


@plain("generic")
def rnn_cells() -> tuple[nn.Module, Inputs]:
    """`nn.RNNCell` in a loop, of which the last state counts."""
    return Wrapped(Last(LoopOfCells(nn.RNNCell(8, WIDTH)))), series()


@plain("generic")
def relu_rnn() -> tuple[nn.Module, Inputs]:
    """`nn.RNN` with ReLU."""
    return Tagger(nn.RNN(32, WIDTH, num_layers=2, nonlinearity="relu", batch_first=True), WIDTH), tagged()


@plain("encoder")
def bidirectional_lstm() -> tuple[nn.Module, Inputs]:
    """Both ways, two layers."""
    return Tagger(nn.LSTM(32, WIDTH, 2, batch_first=True, bidirectional=True), 2 * WIDTH), tagged()


@plain("encoder")
def bidirectional_gru() -> tuple[nn.Module, Inputs]:
    """Both ways."""
    return Tagger(nn.GRU(32, WIDTH, batch_first=True, bidirectional=True), 2 * WIDTH), tagged()


class CellRecurrence(nn.Module):
    """Base of cells that are written out: a loop over `step`, and the states side by side."""

    def __init__(self, width: int = WIDTH, taken: int = 32) -> None:
        super().__init__()
        self.width = width
        self.build(taken, width)

    def build(self, taken: int, width: int) -> None:
        """Make the layers."""
        raise NotImplementedError

    def step(self, now: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The next state; its first part is what goes out."""
        raise NotImplementedError

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        zero = inputs.new_zeros(inputs.shape[0], self.width)
        state: tuple[torch.Tensor, ...] = (zero, zero)
        states = []
        for t in range(inputs.shape[1]):
            state = self.step(inputs[:, t], state)
            states.append(state[0])
        return torch.stack(states, 1)


class WrittenLSTMRecurrence(CellRecurrence):
    """An LSTM with one layer for all gates."""

    def build(self, taken, width):
        self.gates = nn.Linear(taken + width, 4 * width)

    def step(self, now, state):
        hidden, cell = state
        i, f, g, o = self.gates(torch.cat([now, hidden], -1)).chunk(4, -1)
        cell = torch.sigmoid(f + 1) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell


class PeepholeRecurrence(CellRecurrence):
    """An LSTM whose gates see the cell."""

    def build(self, taken, width):
        self.from_input, self.from_hidden = nn.Linear(taken, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.peeps = nn.ParameterList([nn.Parameter(torch.randn(width) * 0.1) for _ in range(3)])

    def step(self, now, state):
        hidden, cell = state
        i, f, g, o = (self.from_input(now) + self.from_hidden(hidden)).split(self.width, -1)
        i, f = torch.sigmoid(i + self.peeps[0] * cell), torch.sigmoid(f + self.peeps[1] * cell)
        cell = f * cell + i * torch.tanh(g)
        return torch.sigmoid(o + self.peeps[2] * cell) * torch.tanh(cell), cell


class NormedLSTMRecurrence(CellRecurrence):
    """An LSTM with layer norms around its gates."""

    def build(self, taken, width):
        self.from_input, self.from_hidden = nn.Linear(taken, 4 * width), nn.Linear(width, 4 * width)
        self.norms = nn.ModuleList([nn.LayerNorm(4 * width), nn.LayerNorm(4 * width), nn.LayerNorm(width)])

    def step(self, now, state):
        hidden, cell = state
        gates = self.norms[0](self.from_input(now)) + self.norms[1](self.from_hidden(hidden))
        i, f, g, o = gates.chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * self.norms[2](cell).tanh(), cell


class WrittenGRURecurrence(CellRecurrence):
    """A GRU with a layer for each gate."""

    def build(self, taken, width):
        self.update, self.reset, self.candidate = (nn.Linear(taken + width, width) for _ in range(3))

    def step(self, now, state):
        hidden = state[0]
        both = torch.cat([now, hidden], -1)
        z, r = torch.sigmoid(self.update(both)), torch.sigmoid(self.reset(both))
        candidate = torch.tanh(self.candidate(torch.cat([now, r * hidden], -1)))
        return ((1 - z) * hidden + z * candidate,)


class MinimalGatedRecurrence(CellRecurrence):
    """One gate that forgets and resets."""

    def build(self, taken, width):
        self.forget, self.candidate = nn.Linear(taken + width, width), nn.Linear(taken + width, width)

    def step(self, now, state):
        hidden = state[0]
        f = torch.sigmoid(self.forget(torch.cat([now, hidden], -1)))
        return (torch.lerp(hidden, torch.tanh(self.candidate(torch.cat([now, f * hidden], -1))), f),)


class ElmanRecurrence(CellRecurrence):
    """tanh(W x + U h)."""

    def build(self, taken, width):
        self.from_input, self.from_hidden = nn.Linear(taken, width), nn.Linear(width, width, bias=False)

    def step(self, now, state):
        return (torch.tanh(self.from_input(now) + self.from_hidden(state[0])),)


class CharacterRecurrence(CellRecurrence):
    """tanh(W [x, h]), as in tutorials."""

    def build(self, taken, width):
        self.hidden = nn.Linear(taken + width, width)

    def step(self, now, state):
        return (torch.tanh(self.hidden(torch.cat((now, state[0]), 1))),)


class IndependentRecurrence(CellRecurrence):
    """relu(W x + u * h): neurons that see only themselves."""

    def build(self, taken, width):
        self.from_input, self.own = nn.Linear(taken, width), nn.Parameter(torch.rand(width))

    def step(self, now, state):
        return (torch.relu(self.from_input(now) + self.own * state[0]),)


class ExponentialRecurrence(CellRecurrence):
    """The cell sLSTM of xLSTM: exponential gates with a stabiliser."""

    def build(self, taken, width):
        self.from_input, self.from_hidden = nn.Linear(taken, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def step(self, now, state):
        hidden, cell, norm, top = state if len(state) == 4 else (*state, state[0], state[0])
        i, f, g, o = (self.from_input(now) + self.from_hidden(hidden)).chunk(4, -1)
        f = functional.logsigmoid(f)
        new_top = torch.maximum(f + top, i)
        kept, added = torch.exp(f + top - new_top), torch.exp(i - new_top)
        cell, norm = kept * cell + added * torch.tanh(g), kept * norm + added
        return torch.sigmoid(o) * cell / norm.clamp(min=1e-6), cell, norm, new_top


def _written(name: str, made: type[CellRecurrence], kind: str = "encoder") -> None:
    def make() -> tuple[nn.Module, Inputs]:
        return Tagger(made(), WIDTH), tagged()

    make.__name__, make.__doc__ = name, made.__doc__
    plain(kind)(make)


for _name, _made in {
    "written_lstm": WrittenLSTMRecurrence, "peephole_lstm": PeepholeRecurrence, "normed_lstm": NormedLSTMRecurrence,
    "written_gru": WrittenGRURecurrence, "minimal_gated": MinimalGatedRecurrence, "written_elman": ElmanRecurrence,
    "character_rnn": CharacterRecurrence, "independent_rnn": IndependentRecurrence, "s_lstm": ExponentialRecurrence,
}.items():  # fmt: skip
    _written(_name, _made)


class ConvolutionalRecurrence(nn.Module):
    """An LSTM over pictures, with convolutions for layers (ConvLSTM), or a GRU."""

    def __init__(self, gated: int) -> None:
        super().__init__()
        self.gates = nn.Conv2d(4, 4 * gated // 2, 3, padding=1)
        self.candidate = nn.Conv2d(4, 2, 3, padding=1)
        self.gated = gated

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = cell = inputs.new_zeros(inputs.shape[0], 2, *inputs.shape[-2:])
        for frame in inputs.unbind(1):
            gates = torch.sigmoid(self.gates(torch.cat([frame, hidden], 1))).chunk(self.gated, 1)
            if self.gated == 4:
                cell = gates[0] * cell + gates[1] * torch.tanh(self.candidate(torch.cat([frame, hidden], 1)))
                hidden = gates[2] * torch.tanh(cell)
            else:
                candidate = torch.tanh(self.candidate(torch.cat([frame, gates[0] * hidden], 1)))
                hidden = (1 - gates[1]) * hidden + gates[1] * candidate
        return hidden


@plain("vision")
def conv_lstm() -> tuple[nn.Module, Inputs]:
    """Frames to the next frame."""
    return Wrapped(ConvolutionalRecurrence(4)), {
        "inputs": numbers(2, 4, 2, 8, 8),
        "labels": numbers(2, 2, 8, 8, seed=1),
    }


@plain("vision")
def conv_gru() -> tuple[nn.Module, Inputs]:
    """Frames to the next frame."""
    return Wrapped(ConvolutionalRecurrence(2)), {
        "inputs": numbers(2, 4, 2, 8, 8),
        "labels": numbers(2, 2, 8, 8, seed=1),
    }


class Translator(nn.Module):
    """A GRU reads, another writes and looks back (Bahdanau)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.reader = nn.GRU(32, WIDTH, batch_first=True)
        self.writer = nn.GRUCell(32 + WIDTH, WIDTH)
        self.ask, self.answer, self.weigh = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.out = nn.Linear(WIDTH, WORDS)

    def get_output_embeddings(self) -> nn.Module:
        """The layer that scores words."""
        return self.out

    def get_input_embeddings(self) -> nn.Module:
        """The table of words."""
        return self.words

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor | None = None):
        read, last = self.reader(self.words(inputs))
        state, written = last[0], []
        for t in range(targets.shape[1]):
            scores = self.weigh(torch.tanh(self.ask(state).unsqueeze(1) + self.answer(read)))
            context = (scores.softmax(1) * read).sum(1)
            state = self.writer(torch.cat([self.words(targets[:, t]), context], -1), state)
            written.append(self.out(state))
        return with_loss(torch.stack(written, 1), labels)


@plain("encoder")
def translation_recurrence() -> tuple[nn.Module, Inputs]:
    """Words to words."""
    return Translator(), {"inputs": words(length=5), "targets": words(1, 4), "labels": words(2, 4)}


class Writing(nn.Module):
    """A GRU that reads what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(WORDS, 32), nn.GRUCell(32, WIDTH), nn.Linear(WIDTH, WORDS)

    def get_output_embeddings(self) -> nn.Module:
        """The layer that scores words."""
        return self.out

    def get_input_embeddings(self) -> nn.Module:
        """The table of words."""
        return self.words

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        token, state, written = inputs[:, 0], None, []
        for _ in range(4):
            state = self.cell(self.words(token), state)
            written.append(self.out(state))
            token = written[-1].argmax(-1)
        return with_loss(torch.stack(written, 1), labels)


@plain("encoder")
def gru_decoder() -> tuple[nn.Module, Inputs]:
    """One word after the other."""
    return Writing(), {"inputs": words(length=4), "labels": words(1, 4)}


class Critic(nn.Module):
    """One step of an agent: what it sees and its state to its next state, and how good that is."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.cell, self.value = nn.Linear(8, WIDTH), nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, seen, hidden, cell, labels=None):
        hidden, cell = self.cell(torch.relu(self.see(seen)), (hidden, cell))
        return {**with_loss(self.value(hidden), labels), "hidden": hidden, "cell": cell}


@plain("generic")
def lstm_critic() -> tuple[nn.Module, Inputs]:
    """One step."""
    given = {"seen": numbers(2, 8), "hidden": numbers(2, WIDTH, seed=1), "cell": numbers(2, WIDTH, seed=2)}
    return Critic(), given | {"labels": numbers(2, 1, seed=3)}
