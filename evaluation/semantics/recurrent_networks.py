"""Further recurrences, as they are written elsewhere. Labels come from classes, as in `recurrent_cells`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from evaluation.semantics.plain_models import plain
from evaluation.semantics.plain_networks import Tagger
from evaluation.semantics.recurrent_cells import WIDTH, CellRecurrence, tagged
from evaluation.zoo.building import Inputs

TAKEN = 32
States = tuple[torch.Tensor, ...]


class EchoRecurrence(CellRecurrence):
    """A reservoir that leaks."""

    def build(self, taken: int, width: int) -> None:
        self.taken, self.reservoir = nn.Linear(taken, width), nn.Linear(width, width, bias=False)

    def step(self, now: torch.Tensor, state: States) -> States:
        return (0.7 * state[0] + 0.3 * torch.tanh(self.taken(now) + self.reservoir(state[0])),)


class ContinuousRecurrence(EchoRecurrence):
    """A differential equation, step by step."""

    def step(self, now: torch.Tensor, state: States) -> States:
        change = -state[0] + torch.relu(self.taken(now) + self.reservoir(state[0]))
        return (state[0] + 0.1 * change,)


class AntisymmetricRecurrence(EchoRecurrence):
    """The matrix less its transpose, so that states neither grow nor fade."""

    def step(self, now: torch.Tensor, state: States) -> States:
        weight = self.reservoir.weight
        turned = state[0] @ (weight - weight.T - 0.01 * torch.eye(self.width, device=weight.device)).T
        return (state[0] + 0.1 * torch.tanh(turned + self.taken(now)),)


class SigmoidRecurrence(EchoRecurrence):
    """Elman's with sigmoids."""

    def step(self, now: torch.Tensor, state: States) -> States:
        return (torch.sigmoid(self.taken(now) + self.reservoir(state[0])),)


class MemoryRecurrence(CellRecurrence):
    """A linear memory that a matrix turns, and a nonlinear state beside it (LMU)."""

    def build(self, taken: int, width: int) -> None:
        self.into = nn.Linear(taken + width, 1)
        self.register_buffer("turn", torch.randn(width, width) * 0.1)
        self.register_buffer("enter", torch.randn(1, width))
        self.layer = nn.Linear(taken + 2 * width, width)

    def step(self, now: torch.Tensor, state: States) -> States:
        hidden, memory = state
        signal = self.into(torch.cat([now, hidden], -1))
        memory = memory @ self.turn.T + signal * self.enter
        return torch.tanh(self.layer(torch.cat([now, hidden, memory], -1))), memory


class LiquidRecurrence(CellRecurrence):
    """Two candidates, and a gate between them (closed-form continuous time)."""

    def build(self, taken: int, width: int) -> None:
        self.one, self.other, self.time = (nn.Linear(taken + width, width) for _ in range(3))

    def step(self, now: torch.Tensor, state: States) -> States:
        both = torch.cat([now, state[0]], 1)
        gate = torch.sigmoid(self.time(both))
        return (torch.tanh(self.one(both)) * (1.0 - gate) + gate * torch.tanh(self.other(both)),)


class AveragedRecurrence(CellRecurrence):
    """Moving averages with weights that are learnt (MEGA)."""

    def build(self, taken: int, width: int) -> None:
        self.layer = nn.Linear(taken, width)
        self.alpha = nn.Parameter(torch.randn(width))

    def step(self, now: torch.Tensor, state: States) -> States:
        alpha = torch.sigmoid(self.alpha)
        return (alpha * self.layer(now) + (1 - alpha) * state[0],)


class MatrixMemoryRecurrence(nn.Module):
    """A memory of outer products with exponential gates, and their largest taken out (mLSTM)."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(TAKEN, 3 * WIDTH)
        self.gates = nn.Linear(TAKEN, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = self.projections(inputs).chunk(3, -1)
        enter, forget = self.gates(inputs).unbind(-1)
        memory = inputs.new_zeros(inputs.shape[0], WIDTH, WIDTH)
        norm, largest = inputs.new_zeros(inputs.shape[0], WIDTH), inputs.new_zeros(inputs.shape[0])
        states = []
        for t in range(inputs.shape[1]):
            log = functional.logsigmoid(forget[:, t])
            new = torch.maximum(log + largest, enter[:, t])
            i, f = torch.exp(enter[:, t] - new), torch.exp(log + largest - new)
            largest = new
            memory = f[:, None, None] * memory + i[:, None, None] * value[:, t, :, None] * key[:, t, None, :]
            norm = f[:, None] * norm + i[:, None] * key[:, t]
            read = torch.einsum("bij,bj->bi", memory, query[:, t])
            states.append(read / (norm * query[:, t]).sum(-1, keepdim=True).abs().clamp(min=1.0))
        return torch.stack(states, 1)


class FixedDecayRecurrence(nn.Module):
    """Weights of keys and values that decay by a parameter, in a loop over positions (RWKV 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.receptance, self.key, self.value = (nn.Linear(TAKEN, WIDTH, bias=False) for _ in range(3))
        self.decay, self.bonus = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        r, k, v = self.receptance(inputs), self.key(inputs), self.value(inputs)
        w = torch.exp(-torch.exp(self.decay)).unsqueeze(-1)
        u = self.bonus.unsqueeze(-1)
        state = torch.zeros(inputs.shape[0], WIDTH, WIDTH, device=inputs.device)
        out = torch.empty_like(v)
        for t in range(inputs.shape[1]):
            kv = k[:, t, :, None] * v[:, t, None, :]
            out[:, t] = (r[:, t, None, :] @ (state + u * kv)).squeeze(1)
            state = state * w + kv
        return out


class ChunkedRetentionRecurrence(nn.Module):
    """Retention in chunks: within a chunk by a matrix of powers, between chunks by a state."""

    def __init__(self, chunk: int = 2) -> None:
        super().__init__()
        self.chunk = chunk
        self.query, self.key, self.value = (nn.Linear(TAKEN, WIDTH, bias=False) for _ in range(3))
        self.gamma = 0.9

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        at = torch.arange(self.chunk, device=inputs.device)
        apart = (at[:, None] - at[None, :]).float()
        inner = torch.where(apart >= 0, self.gamma**apart, 0.0)
        state = torch.zeros(inputs.shape[0], WIDTH, WIDTH, device=inputs.device)
        outputs = []
        for part in inputs.split(self.chunk, 1):
            query, key, value = self.query(part), self.key(part), self.value(part)
            within = (query @ key.transpose(1, 2) * inner) @ value
            across = (query @ state) * self.gamma ** (at + 1.0)[:, None]
            outputs.append(within + across)
            late = self.gamma ** (self.chunk - 1.0 - at)[:, None]
            state = self.gamma**self.chunk * state + key.transpose(1, 2) @ (value * late)
        return torch.cat(outputs, 1)


class ChunkedGateRecurrence(nn.Module):
    """Gated linear attention in chunks: gates are added up within each."""

    def __init__(self, chunk: int = 3) -> None:
        super().__init__()
        self.chunk = chunk
        self.query, self.key, self.value, self.gate = (nn.Linear(TAKEN, WIDTH, bias=False) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        def parts(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(1, (-1, self.chunk))

        query, key, value = parts(self.query(inputs)), parts(self.key(inputs)), parts(self.value(inputs))
        gates = parts(functional.logsigmoid(self.gate(inputs)) / 16).cumsum(2)
        query, opposite = query * gates.exp(), key * (-gates).exp()
        late = key * (gates[:, :, -1:] - gates).exp()
        mask = torch.ones(self.chunk, self.chunk, device=inputs.device).tril()
        state, outputs = torch.zeros(inputs.shape[0], WIDTH, WIDTH, device=inputs.device), []
        for i in range(query.shape[1]):
            within = (query[:, i] @ opposite[:, i].transpose(1, 2) * mask) @ value[:, i]
            outputs.append(within + query[:, i] @ state)
            kept = gates[:, i, -1].exp().unsqueeze(-1)
            state = kept * state + late[:, i].transpose(1, 2) @ value[:, i]
        return torch.cat(outputs, 1)


class DualityRecurrence(nn.Module):
    """Mamba2's sums over segments, minimal."""

    def __init__(self, heads: int = 2, chunk: int = 3) -> None:
        super().__init__()
        self.heads, self.chunk, self.size = heads, chunk, 4
        self.project = nn.Linear(TAKEN, WIDTH + 2 * self.size + heads)
        self.log = nn.Parameter(torch.zeros(heads))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x, b, c, step = self.project(inputs).split([WIDTH, self.size, self.size, self.heads], -1)
        step = functional.softplus(step)
        x = (x.unflatten(-1, (self.heads, -1)) * step.unsqueeze(-1)).unflatten(1, (-1, self.chunk))
        b, c = b.unflatten(1, (-1, self.chunk)), c.unflatten(1, (-1, self.chunk))
        decay = (-torch.exp(self.log) * step).unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2)
        total = torch.cumsum(decay, -1)
        left = torch.exp(_segments(decay))
        within = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, left, x)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", b, torch.exp(total[..., -1:] - total), x)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        between = torch.exp(_segments(functional.pad(total[..., -1], (1, 0))))
        states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
        across = torch.einsum("bcln,bchpn,bhcl->bclhp", c, states, torch.exp(total))
        return (within + across).flatten(3).flatten(1, 2)


def _segments(x: torch.Tensor) -> torch.Tensor:
    """Sums over all segments, by differences of sums."""
    total = torch.cumsum(x, -1)
    apart = total[..., :, None] - total[..., None, :]
    lower = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril()
    return apart.masked_fill(~lower, -torch.inf)


class LogSpaceRecurrence(nn.Module):
    """minLSTM of all positions at once, in logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.forget, self.enter, self.hidden = (nn.Linear(TAKEN, WIDTH) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        apart = functional.softplus(-self.forget(inputs)) - functional.softplus(-self.enter(inputs))
        kept, added = -functional.softplus(apart), -functional.softplus(-apart)
        hidden = self.hidden(inputs)
        value = torch.where(hidden >= 0, (functional.relu(hidden) + 0.5).log(), -functional.softplus(-hidden))
        star = functional.pad(kept.cumsum(1), (0, 0, 1, 0))
        first = torch.zeros_like(value[:, :1])
        inner = torch.logcumsumexp(torch.cat([first, value + added], 1) - star, 1)
        return torch.exp(star + inner)[:, 1:]


class DoublingRecurrence(nn.Module):
    """A gated linear recurrence by doubling: each position takes in what lies one, two, four before it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(TAKEN, WIDTH), nn.Linear(TAKEN, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kept = torch.sigmoid(self.gate(inputs))
        state = (1 - kept) * self.value(inputs)
        reach = 1
        while reach < inputs.shape[1]:
            state = state + kept * functional.pad(state, (0, 0, reach, 0))[:, :-reach]
            kept = kept * functional.pad(kept, (0, 0, reach, 0), value=1.0)[:, :-reach]
            reach *= 2
        return state


class LookingRecurrence(nn.Module):
    """A decoder that looks at all of what came in before each step (Bahdanau)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2 * TAKEN, WIDTH)
        self.query, self.key, self.score = nn.Linear(WIDTH, 8), nn.Linear(TAKEN, 8), nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        keys, state, states = self.key(inputs), inputs.new_zeros(inputs.shape[0], WIDTH), []
        for t in range(inputs.shape[1]):
            weights = self.score(torch.tanh(self.query(state).unsqueeze(1) + keys)).softmax(1)
            state = self.cell(torch.cat([inputs[:, t], (weights * inputs).sum(1)], -1), state)
            states.append(state)
        return torch.stack(states, 1)


class Packed(nn.Module):
    """PyTorch's layer over sequences of unlike lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(TAKEN, WIDTH // 2, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(inputs, torch.tensor([6, 4]), batch_first=True)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


class Backwards(nn.Module):
    """One recurrence forwards and one backwards, written out."""

    def __init__(self, made: type[CellRecurrence]) -> None:
        super().__init__()
        self.there, self.back = made(WIDTH // 2), made(WIDTH // 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.there(inputs), self.back(inputs.flip(1)).flip(1)], -1)


def _enter(name: str, made: type[nn.Module]) -> None:
    def make() -> tuple[nn.Module, Inputs]:
        layers = Backwards(SigmoidRecurrence) if made is Backwards else made()
        return Tagger(layers, WIDTH), tagged()

    make.__name__, make.__doc__ = name, made.__doc__
    plain("encoder")(make)


for _name, _made in {
    "echo_state": EchoRecurrence, "continuous_rnn": ContinuousRecurrence, "antisymmetric_rnn": AntisymmetricRecurrence,
    "sigmoid_rnn": SigmoidRecurrence, "legendre_memory": MemoryRecurrence, "liquid_rnn": LiquidRecurrence,
    "moving_average": AveragedRecurrence, "m_lstm": MatrixMemoryRecurrence, "rwkv_5": FixedDecayRecurrence,
    "chunked_retention": ChunkedRetentionRecurrence, "chunked_gates": ChunkedGateRecurrence,
    "state_space_duality": DualityRecurrence, "min_lstm": LogSpaceRecurrence, "doubling_scan": DoublingRecurrence,
    "looking_decoder": LookingRecurrence, "unlike_lengths": Packed, "two_directions": Backwards,
}.items():  # fmt: skip
    _enter(_name, _made)
