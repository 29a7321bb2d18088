"""Recurrences are found in whatever form they were recorded, and nothing that only looks like one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import djinn
from djinn_patterns.recurrent.pattern import Recurrent

DEVICE = "remote_accelerator:0"
WIDTH, TIME = 6, 4


def found_in(graph):
    pattern = Recurrent()
    return list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))


def recorded(model, *inputs, train=False):
    """As Djinn records it, on meta tensors: no executor is needed to look at a program. What comes out is held meanwhile."""
    model = model.train(train).to(DEVICE) if isinstance(model, nn.Module) else model
    given = [i.to(DEVICE) if isinstance(i, torch.Tensor) else i for i in inputs]
    with djinn.capture() as captured, torch.set_grad_enabled(train):
        result = model(*given)
        if train:
            (result[0] if isinstance(result, tuple) else result).sum().backward()
    return captured.graph, result


def matches(model, *inputs, train=False):
    return found_in(recorded(model, *inputs, train=train)[0])


def series(width=WIDTH):
    return torch.zeros(2, TIME, width)


class Loop(nn.Module):
    """A step again and again; states side by side, or the last one."""

    def __init__(self, make, step, last=False):
        super().__init__()
        self.layers, self.step, self.last = make(), step, last

    def forward(self, inputs):
        state, states = inputs.new_zeros(inputs.shape[0], WIDTH), []
        for t in range(inputs.shape[1]):
            state = self.step(self.layers, inputs[:, t], state)
            states.append(state)
        return state if self.last else torch.stack(states, 1)


def layers(count, taken=WIDTH, given=WIDTH):
    return lambda: nn.ModuleList(nn.Linear(taken, given) for _ in range(count))


def gated(parts, x, h):
    z = torch.sigmoid(parts[0](x) + parts[1](h))
    return z * h + (1 - z) * torch.tanh(parts[2](x) + parts[3](h))


def masked(parts, x, h):
    new, mask = gated(parts, x, h), (x[:, :1] > 0).float()
    return mask * new + (1 - mask) * h


def bounded(parts, x, h):
    gate = 0.1 + 0.9 * torch.sigmoid(parts[0](x))
    return gate * h + parts[1](x)


def in_place(parts, x, h):
    return h.mul(torch.exp(-functional.softplus(parts[0](x)))).add_(parts[1](x))


def interpolated(parts, x, h):
    return torch.lerp(h, torch.tanh(parts[0](x)), torch.sigmoid(parts[1](x)))


def plain(parts, x, h):
    return torch.tanh(parts[0](x) + parts[1](h))


def with_relu(parts, x, h):
    return torch.relu(parts[0](torch.cat([x, h], -1)))


def by_matrix(parts, x, h):
    return parts[0](h) + parts[1](x)


def leaking(parts, x, h):
    return h + 0.1 * (-h + torch.relu(parts[0](x) + parts[1](h)))


STEPS = {
    "gru": (layers(4), gated), "masked": (layers(4), masked), "linear": (layers(2), bounded),
    "in place": (layers(2), in_place), "lerp": (layers(2), interpolated), "rnn": (layers(2), plain),
    "joined": (layers(1, 2 * WIDTH), with_relu), "matrix": (layers(2), by_matrix),
    "leaking": (layers(2), leaking),
}  # fmt: skip


KINDS = {
    "gru": "gru",
    "masked": "gru",
    "rnn": "rnn",
    "joined": "rnn",
    "matrix": "loop",
    "leaking": "rnn",
}  # all others are linear


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_loops_are_one_recurrence(name, train):
    (match,) = matches(Loop(*STEPS[name]), series(), train=train)
    assert match.details["steps"] == TIME
    assert match.details["form"] == "steps"
    assert match.details["kind"] == KINDS.get(name, "linear")
    assert "time" not in match.hints["cut"]


def test_positions_that_take_in_what_lies_before_them_twice_as_far_each_time():
    """A scan by doubling: what two stretches keep is the product of what each keeps."""
    gate, value = nn.Linear(WIDTH, WIDTH).to(DEVICE), nn.Linear(WIDTH, WIDTH).to(DEVICE)

    def doubling(x):
        kept = torch.sigmoid(gate(x))
        state = (1 - kept) * value(x)
        for reach in (1, 2):
            state = state + kept * functional.pad(state, (0, 0, reach, 0))[:, :-reach]
            kept = kept * functional.pad(kept, (0, 0, reach, 0), value=1.0)[:, :-reach]
        return state

    (match,) = matches(doubling, series())
    assert match.details["kind"] == "linear"


def test_what_is_put_before_the_first_position_is_no_end_of_a_scan():
    """minLSTM in logarithms: the layers behind what is added belong to it."""
    gate, value = nn.Linear(WIDTH, WIDTH).to(DEVICE), nn.Linear(WIDTH, WIDTH).to(DEVICE)

    def in_logarithms(x):
        kept, added = -functional.softplus(gate(x)), -functional.softplus(value(x))
        total = functional.pad(kept.cumsum(1), (0, 0, 1, 0))
        inner = torch.logcumsumexp(torch.cat([torch.zeros_like(added[:, :1]), added], 1) - total, 1)
        return torch.exp(total + inner)

    graph, _ = recorded(in_logarithms, series())
    (match,) = found_in(graph)
    assert {n.id for n in graph.nodes if n.operation == "softplus"} <= set(match.nodes)


@pytest.mark.parametrize("name", ["gru", "rnn"])
def test_the_last_state_alone_is_enough(name):
    assert [m.details["steps"] for m in matches(Loop(*STEPS[name], last=True), series())] == [TIME]


@pytest.mark.parametrize(
    ("layer", "kind", "count", "both"),
    [
        (nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), "lstm", 2, False),
        (nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True), "gru", 1, True),
        (nn.RNN(WIDTH, WIDTH, batch_first=True), "rnn", 1, False),
    ],
)
def test_layers_of_pytorch(layer, kind, count, both):
    (match,) = matches(layer, series())
    assert match.confidence == 1.0
    assert match.details == {"kind": kind, "form": "op", "steps": TIME, "layers": count, "bidirectional": both}
    apart = matches(layer, series(), train=True)
    assert [m.details["kind"] for m in apart] == [kind] * count * (2 if both else 1)
    assert {m.details["steps"] for m in apart} == {TIME}


@pytest.mark.parametrize("train", [False, True])
def test_packed_sequences(train):
    lengths = torch.tensor([TIME, TIME - 1])

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, inputs):
            return self.layer(nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True))[0].data

    found = matches(Packed(), series(), train=train)
    assert {m.details["kind"] for m in found} == {"lstm"}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_a_single_step_of_a_state_that_is_kept(cell, train):
    state = torch.zeros(2, WIDTH)
    given = (state, state.clone()) if cell is nn.LSTMCell else state
    given = tuple(s.to(DEVICE) for s in given) if isinstance(given, tuple) else given.to(DEVICE)
    (match,) = matches(cell(WIDTH, WIDTH), torch.zeros(2, WIDTH), given, train=train)
    assert match.details["steps"] == 1


def test_what_a_gate_says_may_be_masked_before_the_state():
    """As in RG-LRU, where a document ends."""
    gate, reset = nn.Linear(WIDTH, WIDTH).to(DEVICE), torch.zeros(2, 1, dtype=torch.bool, device=DEVICE)

    def step(x, state):
        kept = torch.exp(-8.0 * functional.softplus(gate(x))) * ~reset
        return kept * state + x

    (match,) = matches(step, torch.zeros(2, WIDTH), torch.zeros(2, WIDTH))
    assert match.details["kind"] == "linear"


def test_the_backward_pass_of_a_recurrence_is_none():
    """Gradients go back through the same decays, as states went forward."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, inputs):
            gates, new = self.layer(inputs).chunk(2, -1)
            gates, state, states = torch.sigmoid(gates), inputs.new_zeros(inputs.shape[0], WIDTH), []
            for gate, added in zip(gates.unbind(1), new.unbind(1), strict=True):
                state = gate * state + added
                states.append(state)
            return torch.stack(states, 1).sin()

    graph, _ = recorded(Pooled(), series(), train=True)
    (match,) = found_in(graph)
    loss = next(n.id for n in graph.nodes if n.operation == "ones_like")
    assert max(match.nodes) < loss


class Decaying(nn.Module):
    """A linear recurrence of all positions at once: decays of one position at another (Mamba2)."""

    def __init__(self):
        super().__init__()
        self.decay, self.value = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        sums = -functional.softplus(self.decay(inputs)).cumsum(1)
        apart = (sums - sums.transpose(1, 2)).masked_fill(
            torch.ones(TIME, TIME, device=inputs.device).triu(1).bool(), -1e9
        )
        return apart.exp() @ self.value(inputs)


class Sums(nn.Module):
    """Running sums of keys times values."""

    def __init__(self):
        super().__init__()
        self.layers = layers(3)()

    def forward(self, inputs):
        query, key, value = (layer(inputs) for layer in self.layers)
        pairs = (key.unsqueeze(-1) * value.unsqueeze(-2)).cumsum(1)
        return (query.unsqueeze(-2) @ pairs).squeeze(-2)


class Convolved(nn.Module):
    """A kernel of powers, convolved by Fourier transforms."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.rand(WIDTH, 1))

    def forward(self, inputs):
        kernel = torch.exp(-self.rate * torch.arange(TIME, device=inputs.device))
        spectrum = torch.fft.rfft(inputs.transpose(1, 2), n=2 * TIME) * torch.fft.rfft(kernel, n=2 * TIME)
        return torch.fft.irfft(spectrum, n=2 * TIME)[..., :TIME]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("model", [Decaying, Sums, Convolved])
def test_scans(model, train):
    (match,) = matches(model(), series(), train=train)
    assert (match.details["kind"], match.details["form"]) == ("linear", "scan")
    assert "heads" in match.hints["cut"]


def test_two_layers_are_two_recurrences_and_nothing_of_the_layers_between():
    model = nn.Sequential(Loop(*STEPS["gru"]), nn.Linear(WIDTH, WIDTH), nn.GELU(), Loop(*STEPS["gru"]))
    graph, _ = recorded(model, series())
    first, second = found_in(graph)
    between = next(n.id for n in graph.nodes if n.operation == "gelu")
    assert max(first.nodes) < between < min(second.nodes)


def test_what_is_made_of_each_state_is_not_part_of_it():
    """A layer that scores each state in the same loop lies outside."""
    cell, head = nn.GRUCell(WIDTH, WIDTH).to(DEVICE), nn.Linear(WIDTH, 9).to(DEVICE)

    def scored(inputs):
        state, scores = torch.zeros(2, WIDTH, device=DEVICE), []
        for step in inputs.unbind(1):
            state = cell(step, state)
            scores.append(head(state))
        return torch.stack(scores, 1)

    graph, _ = recorded(scored, series())
    (match,) = found_in(graph)
    heads = {n.id for n in graph.nodes if graph.meta(n.outputs[0]).shape == (2, 9)}
    assert len(heads) == TIME
    assert not heads & set(match.nodes)


class Repeated(nn.Module):
    """Something again and again, each time with weights of its own, or always the same."""

    def __init__(self, make, step, count=3):
        super().__init__()
        self.parts, self.step = nn.ModuleList(make() for _ in range(count)), step

    def forward(self, inputs):
        results = []
        for part in self.parts:
            inputs = self.step(part, inputs)
            results.append(inputs)
        return torch.stack(results)


def highway(parts, x):
    gate = torch.sigmoid(parts[0](x))
    return gate * torch.relu(parts[1](x)) + (1 - gate) * x


def squeezed(part, x):
    return x + x * torch.sigmoid(part(x.mean(1, keepdim=True)))


def coupled(part, x):
    left, right = x.chunk(2, -1)
    stretch, shift = part(left).chunk(2, -1)
    return torch.cat([right * stretch.tanh().exp() + shift, left], -1)


def parts_of_channels(part, x):
    return torch.relu(part(x))


def tied(part, x):
    return 2 * torch.relu(part(x))


class Parts(nn.Module):
    """Each part of the channels through a layer of its own, added to the next (Res2Net)."""

    def __init__(self):
        super().__init__()
        self.layers = layers(TIME)()

    def forward(self, inputs):
        result, results = torch.zeros_like(inputs[:, 0]), []
        for part, layer in zip(inputs.unbind(1), self.layers, strict=True):
            result = torch.relu(layer(part + result))
            results.append(result)
        return torch.cat(results, -1)


def always(make):
    """The same module each time."""
    module = make()
    return lambda: module


class Sampled(nn.Module):
    """A mean and a deviation, and what is drawn (VAE)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, inputs):
        mean, deviation = self.layer(inputs).chunk(2, -1)
        return mean + torch.exp(0.5 * deviation) * torch.randn_like(deviation)


def one_layer_many_times():
    make = always(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, dropout=0.0))
    return Repeated(make, lambda part, x: part(x))


NOT = {
    "highway": lambda: Repeated(layers(2), highway), "squeezed": lambda: Repeated(lambda: nn.Linear(WIDTH, WIDTH), squeezed),
    "coupled": lambda: Repeated(lambda: nn.Linear(WIDTH // 2, WIDTH), coupled), "sampled": Sampled,
    "one layer again": one_layer_many_times,
    "network": lambda: Repeated(lambda: nn.Linear(WIDTH, WIDTH), parts_of_channels),
    "tied": lambda: Repeated(always(lambda: nn.Linear(WIDTH, WIDTH)), tied), "parts": Parts,
    "each by itself": lambda: Loop(layers(1), lambda parts, x, h: torch.tanh(parts[0](x)) * 2),
    "positions": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT)
def test_what_only_looks_like_one(name):
    assert not matches(NOT[name](), series(), train=True)


def test_what_may_grow_is_no_decay():
    """A coupling of two inputs stretches one by the other: what comes out is kept, but nothing is forgotten."""
    layer = nn.Linear(WIDTH, 2 * WIDTH).to(DEVICE)

    def coupling(left, right):
        stretch, shift = layer(left).chunk(2, -1)
        return right * stretch.tanh().exp() + shift

    assert not matches(coupling, torch.zeros(2, WIDTH), torch.zeros(2, WIDTH))


def test_cumulative_probabilities_are_no_decays():
    def sample(scores):
        ordered, indices = scores.sort(-1, descending=True)
        above = ordered.softmax(-1).cumsum(-1) > 0.9
        return scores.masked_fill(above.gather(-1, indices), -1e9).softmax(-1)

    assert not matches(sample, torch.zeros(2, 9))
