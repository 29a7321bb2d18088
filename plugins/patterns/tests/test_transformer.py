"""Parts of transformers are found as PyTorch, its autograd and its exporters write them; look-alikes are not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import djinn
import djinn_patterns.transformer
from djinn.planning import fx_graph
from djinn_patterns.transformer import networks

DEVICE = "remote_accelerator:0"
PATTERNS = {pattern.name: pattern for pattern in djinn_patterns.transformer.djinn_register_patterns()}


def found_in(name, graph):
    pattern = PATTERNS[name]
    return list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))


def recorded(model, *inputs, train=False):
    model = copy.deepcopy(model).train(train).to(DEVICE)
    with djinn.capture() as captured, torch.set_grad_enabled(train):
        result = model(*[i.to(DEVICE) for i in inputs])
        if train:
            result.float().sum().backward()
    return captured.graph


def recorded_pair(model, *inputs):
    """The same for a model that gives two results."""
    return recorded(Summed(model), *inputs)


def exported(model, *inputs, train=False):
    with torch.no_grad():
        return fx_graph(torch.export.export(model.eval(), inputs))


class Summed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return sum(part.sum() for part in self.model(*inputs))


class Gated(nn.Module):
    def __init__(self, width=8, together=False):
        super().__init__()
        self.up = nn.Linear(width, 4 * width if together else 2 * width, bias=False)
        self.gate = None if together else nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        up, gate = self.up(x).chunk(2, -1) if self.gate is None else (self.up(x), self.gate(x))
        return self.down(F.silu(gate) * up)


class WrittenOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        x = self.first(x)
        return self.last(0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x.pow(3.0)))))


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        spread = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(spread + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """Attention and a network, one after the other or side by side."""

    def __init__(self, beside=False, eager=False):
        super().__init__()
        self.beside, self.eager = beside, eager
        self.before, self.after = RmsNorm(), nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.network = Gated()

    def attend(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = (q @ k.mT).softmax(-1) @ v if self.eager else F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        normed = self.before(x)
        if self.beside:
            return x + self.attend(normed) + self.network(normed)
        x = x + self.attend(normed)
        return x + self.network(self.after(x))


class Language(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(**how) for _ in range(3))
        self.head = nn.Linear(8, 50, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        mixed = torch.einsum("btd,btkde->btke", x, self.experts[chosen])
        return (mixed * weights[..., None]).sum(-2)


def data(*shape):
    return torch.randn(*shape)


READ = [recorded, exported]


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize(
    ("network", "gated", "layers"),
    [
        (Gated(), True, 3),
        (Gated(together=True), True, 2),
        (WrittenOut(), False, 2),
        (nn.Sequential(nn.Linear(8, 16), nn.GLU(), nn.Linear(8, 8)), True, 2),
        (
            nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 7), nn.GELU(), nn.Linear(7, 8)),
            False,
            3,
        ),
    ],
)
def test_networks(read, network, gated, layers):
    (match,) = found_in("mlp", read(network, data(2, 3, 8)))
    assert match.details["gated"] == gated
    assert match.details["layers"] == layers


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)),
    ],
)
def test_layers_without_an_activation_between_are_no_network(other):
    assert found_in("mlp", recorded(other, data(2, 3, 8))) == []


@pytest.mark.parametrize("read", READ)
def test_norms(read):
    (match,) = found_in("norm", read(RmsNorm(), data(2, 3, 8)))
    assert match.details == {"fused": False, "kind": "rms_norm"}
    (match,) = found_in("norm", read(nn.LayerNorm(8), data(2, 3, 8)))
    assert match.details["fused"]


class Spread(nn.Module):
    """Norms as people write them."""

    def __init__(self, formula):
        super().__init__()
        self.formula = formula
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return self.formula(x, self.weight, self.bias)


def by_deviation(x, w, b):
    return w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + b


def twice_centred(x, w, b):
    spread = (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(spread + 1e-6) * w + b


def by_power(x, w, b):
    return x * (x * x).mean(-1, keepdim=True).add(1e-6).pow(-0.5) * w


def by_length(x, w, b):
    return F.normalize(x, dim=-1) * 8**0.5 * w


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("formula", "kind"),
    [(by_deviation, "layer_norm"), (twice_centred, "layer_norm"), (by_power, "rms_norm"), (by_length, "rms_norm")],
)
def test_norms_that_are_written_out(formula, kind, train):
    (match,) = found_in("norm", recorded(Spread(formula), data(2, 3, 8), train=train))
    assert match.details == {"fused": False, "kind": kind}


def test_a_norm_whose_spread_was_measured_before_is_one():
    class Frozen(nn.Module):
        """As detectors have it: nothing of it is trained."""

        def __init__(self):
            super().__init__()
            for name in ("weight", "bias", "mean", "variance"):
                self.register_buffer(name, torch.ones(4))
            self.convolution = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            weight, bias, mean, variance = (
                b.view(1, -1, 1, 1) for b in (self.weight, self.bias, self.mean, self.variance)
            )
            scale = weight * (variance + 1e-5).rsqrt()
            return self.convolution(x) * scale + (bias - mean * scale)

    graph = recorded(Frozen(), data(2, 3, 8, 8))
    (match,) = found_in("norm", graph)
    assert match.details["kind"] == "batch_norm"
    assert graph.nodes[match.nodes[-1]].operation == "add"


def test_a_norm_within_a_network_bends_nothing_and_does_not_end_it():
    class Normed(nn.Module):
        def __init__(self, bends):
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), RmsNorm()
            self.norm.weight, self.bends = nn.Parameter(torch.ones(16)), bends

        def forward(self, x):
            up = self.up(x)
            return self.down(self.norm(up.relu() if self.bends else up))

    graph = recorded(Normed(bends=True), data(2, 4, 8))
    (match,) = found_in("mlp", graph)
    assert "rsqrt" in {graph.nodes[i].operation for i in match.nodes}
    assert not found_in("mlp", recorded(Normed(bends=False), data(2, 4, 8)))


def test_a_block_may_have_attention_without_a_softmax():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
            self.network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x):
            query, key = self.query(x).relu(), self.key(x).relu()
            x = x + self.out(query @ (key.transpose(1, 2) @ self.value(x)))
            return x + self.network(x)

    graph = recorded(nn.Sequential(Linear(), Linear()), data(2, 5, 8))
    assert len(found_in("block", graph)) == 2
    assert not found_in("block", recorded(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), data(2, 5, 8)))


def test_a_head_may_leave_out_the_token_that_begins():
    class Pixels(nn.Module):
        def __init__(self, fewer):
            super().__init__()
            self.table, self.layer, self.head = nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, 40 - fewer)

        def forward(self, ids):
            return self.head(self.layer(self.table(ids)))

    ids = torch.zeros(2, 5, dtype=torch.long)
    assert len(found_in("output_head", recorded(Pixels(1), ids))) == 1
    assert not found_in("output_head", recorded(Pixels(3), ids))


def test_a_direction_is_no_norm():
    assert found_in("norm", recorded(Spread(lambda x, w, b: F.normalize(x, dim=-1) @ w), data(2, 8))) == []


def test_a_kernel_that_is_standardised_is_no_norm_of_data():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            weight = F.batch_norm(self.weight.flatten(1)[None], None, None, training=True)
            return F.conv2d(x, weight.view_as(self.weight), self.bias)

    assert found_in("norm", recorded(Standardised(3, 4, 3), data(2, 3, 8, 8))) == []


def test_a_distance_is_no_norm():
    class Distance(nn.Module):
        def forward(self, x, y):
            return ((x - y).pow(2).mean(-1) + 1e-6).sqrt()

    assert found_in("norm", recorded(Distance(), data(2, 8), data(2, 8))) == []


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_blocks_heads_and_tables_of_a_language_model(train, beside, eager):
    graph = recorded(Language(beside=beside, eager=eager), torch.arange(12).view(2, 6), train=train)
    blocks = found_in("block", graph)
    assert [b.details for b in blocks] == [{"attentions": 1, "feed_forward": "mlp", "parallel": beside}] * 3
    assert len({n for b in blocks for n in b.nodes}) == sum(len(b.nodes) for b in blocks), "blocks share nothing"
    (head,) = found_in("output_head", graph)
    assert head.details == {"vocabulary": 50, "tied": False}
    assert [m.details["rows"] for m in found_in("embedding", graph)] == [50, 16]
    assert len(found_in("mlp", graph)) == 3
    assert len(found_in("norm", graph)) == (3 if beside else 6)


def test_a_head_that_shares_the_table_is_surer():
    model = Language()
    model.head.weight = model.tokens.weight
    (match,) = found_in("output_head", recorded(model, torch.arange(6).view(1, 6)))
    assert match.details["tied"]
    assert match.confidence == 1.0


@pytest.mark.parametrize("train", [False, True])
def test_a_mixture_is_found_by_its_router(train):
    (match,) = found_in("mixture_of_experts", recorded(Mixture(), data(2, 3, 8), train=train))
    assert match.details == {"experts": 4, "chosen": 2}


def test_groups_of_experts_are_chosen_before_the_experts():
    class Grouped(Mixture):
        def forward(self, x):
            scores = self.router(x).sigmoid()
            best = scores.unflatten(-1, (2, 2)).topk(2, -1).values.sum(-1).topk(1, -1).indices
            mask = torch.zeros(*x.shape[:2], 2, device=x.device).scatter(-1, best, 1.0).repeat_interleave(2, -1)
            weights, chosen = scores.masked_fill(mask == 0, 0.0).topk(1, -1)
            mixed = torch.einsum("btd,btkde->btke", x, self.experts[chosen])
            return (mixed * weights[..., None]).sum(-2)

    (match,) = found_in("mixture_of_experts", recorded(Grouped(), data(2, 3, 8)))
    assert match.details == {"experts": 4, "chosen": 1}


def test_a_shared_expert_belongs_to_the_block_of_the_others():
    class Sharing(Block):
        def __init__(self):
            super().__init__()
            self.mixture = Mixture()

        def forward(self, x):
            x = x + self.attend(self.before(x))
            normed = self.after(x)
            return x + self.mixture(normed) + self.network(normed)

    graph = recorded(Sharing(), data(2, 3, 8))
    (block,) = found_in("block", graph)
    (network,) = found_in("mlp", graph)
    assert block.details["feed_forward"] == "mixture_of_experts"
    assert set(network.nodes) < set(block.nodes)


def test_two_streams_that_attend_together_are_one_block():
    class Streams(Block):
        """Pictures and text in one attention, with a network for each."""

        def __init__(self):
            super().__init__()
            self.other = Gated()

        def forward(self, x, y):
            mixed = self.attend(torch.cat([x, y], dim=1))
            x, y = x + mixed[:, :3], y + mixed[:, 3:]
            return x + self.network(self.after(x)), y + self.other(self.after(y))

    graph = recorded_pair(Streams(), data(2, 3, 8), data(2, 4, 8))
    (block,) = found_in("block", graph)
    assert len(found_in("mlp", graph)) == 2
    assert all(set(match.nodes) < set(block.nodes) for match in found_in("mlp", graph))


def test_one_layer_that_ends_attention_and_network_ends_a_block():
    class Joined(Block):
        def __init__(self):
            super().__init__()
            self.up, self.both = nn.Linear(8, 16), nn.Linear(24, 8)

        def forward(self, x):
            q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.query, self.key, self.value))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return x + self.both(torch.cat([mixed, F.gelu(self.up(x))], dim=-1))

    (block,) = found_in("block", recorded(Joined(), data(2, 3, 8)))
    assert block.details["parallel"]


def test_a_network_for_the_time_is_no_half_of_a_block():
    class Timed(nn.Module):
        """Each stage is told the time, and attends."""

        def __init__(self):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
            self.told = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x, time):
            time = F.silu(self.time(time))
            for told, block in zip(self.told, self.blocks, strict=True):
                x = block(x + told(time)[:, None])
            return x

    graph = recorded(Timed(), data(2, 3, 8), data(2, 8))
    assert [b.details["attentions"] for b in found_in("block", graph)] == [1, 1]
    assert len(found_in("mlp", graph)) == 3, "the time's network ends before the layers that it tells the time"


def test_what_is_added_to_attention_reads_the_same_or_is_no_half():
    class Told(Block):
        def __init__(self):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))

        def forward(self, x, time):
            told = self.time(time)[:, None]
            x = self.attend(self.before(x)) + told
            return x + self.network(self.after(x))

    graph = recorded(Told(), data(2, 3, 8), data(2, 8))
    (block,) = found_in("block", graph)
    _, network = found_in("mlp", graph)
    assert set(network.nodes) < set(block.nodes)
    assert not block.details["parallel"]


def test_what_is_bent_or_normed_is_no_score():
    class Pooled(nn.Module):
        """As many places as features; what is pooled is as wide as there are places."""

        def __init__(self, after):
            super().__init__()
            self.places, self.pool, self.after = nn.Embedding(16, 16), nn.Linear(16, 16), after

        def forward(self, places):
            return self.after(self.pool(self.places(places)))

    for after in (nn.Tanh(), nn.LayerNorm(16)):
        assert found_in("output_head", recorded(Pooled(after), torch.arange(6).view(1, 6))) == []
    (head,) = found_in("output_head", recorded(Pooled(nn.Sigmoid()), torch.arange(6).view(1, 6)))
    assert not head.details["tied"]


def test_a_search_is_made_once_for_all_patterns(monkeypatch):
    calls = []
    search = networks._Search.networks
    monkeypatch.setattr(networks._Search, "networks", lambda self: calls.append(1) or search(self))
    graph = recorded(Language(), torch.arange(6).view(1, 6))
    for name in PATTERNS:
        found_in(name, graph)
    assert len(calls) == 1


def test_the_best_score_without_whose_it_is_chooses_nothing():
    class Detecting(nn.Module):
        """Locations of findings, for the places that are surest to show one."""

        def __init__(self):
            super().__init__()
            self.classes, self.boxes = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            best = self.classes(x).max(-1).values.topk(2, dim=1).indices
            return self.boxes(x).gather(1, best[..., None].expand(-1, -1, 4))

    assert found_in("mixture_of_experts", recorded(Detecting(), data(2, 3, 8))) == []


@pytest.mark.parametrize("scaled", ["data", "product"])
def test_the_nearest_row_of_a_code_book_is_no_token(scaled):
    class Quantiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(20, 8))

        def forward(self, x):
            squares = x.pow(2).sum(1, keepdim=True)
            products = 2 * x @ self.codes.t() if scaled == "data" else 2 * (x @ self.codes.t())
            distances = squares - products + self.codes.pow(2).sum(1)
            return F.embedding(distances.argmin(-1), self.codes)

    assert found_in("output_head", recorded(Quantiser(), data(5, 8))) == []


def test_a_head_is_one_where_the_next_step_of_a_loop_follows():
    class Writing(Language):
        def forward(self, tokens):
            for _ in range(2):
                tokens = torch.cat([tokens, super().forward(tokens)[:, -1:].argmax(-1)], dim=1)
            return tokens

    graph = recorded(Writing(), torch.arange(6).view(1, 6))
    assert len(found_in("output_head", graph)) == 2
    assert len(found_in("block", graph)) == 6


def test_choosing_a_token_is_no_mixture():
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 50)

        def forward(self, x):
            return self.head(x).topk(5).indices

    assert found_in("mixture_of_experts", recorded(Choice(), data(2, 8))) == []
