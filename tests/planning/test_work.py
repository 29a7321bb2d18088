"""Work: FLOPs of whole models as PyTorch counts them, bytes that are really moved, and nothing worked out twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import djinn
from djinn.planning import work_of
from djinn.testing import ProgramBuilder
from djinn_core.planning.builtins import work

F = torch.nn.functional


def capture_graph(function, *inputs):
    with djinn.capture() as recorded:
        function(*[i.to("remote_accelerator:0") if isinstance(i, torch.Tensor) else i for i in inputs])
    return recorded.graph


def work_of_last(graph, operation):
    return work_of(graph, graph.nodes[graph.by_op[operation][-1]])


class SeparableConvolutions(nn.Module):
    """Depthwise, transposed and strided convolutions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, 2, groups=2)
        )
        self.up = nn.ConvTranspose2d(8, 2, 2, 2)

    def forward(self, x):
        return self.up(self.layers(x))


class RecurrentModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(6, 8, 2), nn.GRU(8, 4, bidirectional=True)

    def forward(self, x):
        return self.gru(self.lstm(x)[0])[0]


class TransformerModel(nn.Module):
    """Self-attention, grouped-query cross attention, and products of each rank."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.project = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        y = self.project(self.encoder(x)).view(2, 5, 2, 4).transpose(1, 2)
        keys = y[:, :1, :3].expand(2, 1, 3, 4)
        y = F.scaled_dot_product_attention(y, keys, keys, enable_gqa=True)
        return torch.einsum("bhqd,bhkd->bqk", y, y) @ x[0] + x.mean(0) @ x[0, 0].unsqueeze(-1)


MODELS = {
    "convolutions": (SeparableConvolutions, (2, 4, 12, 12)),
    "recurrent": (RecurrentModel, (5, 3, 6)),
    "transforming": (TransformerModel, (2, 5, 16)),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", MODELS)
def test_model_flops_equal_pytorch_counter(name, backward):
    make, shape = MODELS[name]

    def run(device):
        model, x = make().to(device), torch.empty(shape, device=device)
        with torch.set_grad_enabled(backward):
            made = model(x)
            if backward:
                made.sum().backward()

    with FlopCounterMode(display=False) as counter:
        run("meta")
    with djinn.capture() as recorded:
        run("remote_accelerator:0")
    graph = recorded.graph
    assert sum(work_of(graph, node).flops for node in graph.nodes) == counter.get_total_flops() > 0


def test_grouped_matmul_flops_follow_groups():
    """PyTorch's counter lacks this op. The weight gradient sums over the rows of each group."""
    x, weights = torch.rand(6, 8, dtype=torch.bfloat16), torch.rand(3, 8, 16, dtype=torch.bfloat16)
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)

    def step(x, weights, ends):
        F.grouped_mm(x.requires_grad_(), weights.requires_grad_(), offs=ends).sum().backward()

    graph = capture_graph(step, x, weights, ends)
    assert [work_of(graph, node).flops for node in graph.nodes if node.operation == "_grouped_mm"] == [
        2 * 6 * 8 * 16
    ] * 3


def test_grouped_convolution_flops_follow_groups():
    x, w = torch.rand(1, 8, 6, 6, requires_grad=True), torch.rand(8, 1, 3, 3, requires_grad=True)
    graph = capture_graph(lambda x, w: F.conv2d(x, w, groups=8).sum().backward(), x, w)
    forward, backward = work_of_last(graph, "convolution"), work_of_last(graph, "convolution_backward")
    assert forward.operations == forward.flops == 2 * 8 * 16 * 9
    # PyTorch counts the weight's gradient as if every channel met every other.
    assert backward.operations == 2 * forward.operations < backward.flops
    vectors = capture_graph(torch.mv, torch.rand(3, 4), torch.rand(4))
    assert (work_of_last(vectors, "mv").flops, work_of_last(vectors, "mv").operations) == (0, 2 * 3 * 4)


CACHE = 4 * 64 * 16 * 4  # bytes


@pytest.mark.parametrize(
    ("function", "read", "written"),
    [
        (
            lambda cache, new: cache.index_copy_(1, torch.tensor([3], device=new.device), new),
            4 * 16 * 4 + 8,
            4 * 16 * 4,
        ),
        (lambda cache, new: cache[:, 3:4].copy_(new), 4 * 16 * 4, 4 * 16 * 4),
        (lambda cache, new: cache.add_(new), CACHE + 4 * 16 * 4, CACHE),
        (lambda cache, new: cache.zero_(), 0, CACHE),
        (lambda cache, new: cache + cache, CACHE, CACHE),
        (lambda cache, new: torch.cat([cache, new], 1), CACHE + 4 * 16 * 4, CACHE + 4 * 16 * 4),
        (lambda cache, new: new.expand(4, 64, 16) + 1, 4 * 16 * 4, CACHE),
        (lambda cache, new: torch.empty_like(cache), 0, 0),
        (lambda cache, new: cache.unfold(1, 4, 1) * 1.0, CACHE, 4 * 61 * 16 * 4 * 4),
        (lambda cache, new: cache.transpose(0, 1), 0, 0),
    ],
)
def test_work_counts_bytes_read_and_written(function, read, written):
    graph = capture_graph(function, torch.rand(4, 64, 16), torch.rand(4, 1, 16))
    last = work_of(graph, graph.nodes[-1])
    assert (last.bytes_read, last.bytes_written) == (read, written)


def test_work_is_cached_by_call(monkeypatch):
    asked = []
    known = work._compute_work
    monkeypatch.setattr(work, "_compute_work", lambda graph, node: asked.append(node.op) or known(graph, node))
    monkeypatch.setattr(work, "_work_cache", {})

    def layers(count):
        builder = ProgramBuilder()
        x, w = builder.input(8, 16), builder.input(16, 16)
        for _ in range(count):
            x = builder.op("aten::relu", builder.op("aten::mm", x, w, shape=(8, 16)), shape=(8, 16))
        return builder.graph()

    # The builder makes a form for each op, as different programs do; recorded programs share them.
    with djinn.capture() as recorded:
        x, w = torch.empty(8, 16), torch.empty(16, 16)
        for _ in range(500):
            x = torch.relu(torch.mm(x, w))
    for _ in range(2):
        for node in recorded.graph.nodes:
            work_of(recorded.graph, node)
    assert len(asked) <= 4  # two ops, and two tensors that are made
    graph = layers(3)
    assert [work_of(graph, node).kind for node in graph.nodes] == ["product", "pointwise"] * 3


def test_work_key_includes_scalars_that_change_work():
    one = capture_graph(lambda x, w: F.conv2d(x, w, groups=1), torch.rand(1, 4, 6, 6), torch.rand(4, 4, 3, 3))
    two = capture_graph(lambda x, w: F.conv2d(x, w, groups=2), torch.rand(1, 4, 6, 6), torch.rand(4, 2, 3, 3))
    assert work_of_last(one, "convolution").dims[0] == 1
    assert work_of_last(two, "convolution").dims[0] == 2


def test_fused_layer_kernels_have_flops():
    layer = nn.TransformerEncoderLayer(32, 4, 96, dropout=0.0, batch_first=True)  # trains, so it goes step by step here
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer(torch.rand(3, 10, 32))
    attention, norms = layer.self_attn, (layer.norm1, layer.norm2)
    weights = [attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias]
    after = [p for m in (*norms, layer.linear1, layer.linear2) for p in (m.weight, m.bias)]

    def whole(x, *weights):
        return torch._transformer_encoder_layer_fwd(
            x, 32, 4, *weights[:4], False, False, 1e-5, *weights[4:], mask=None, mask_type=None
        )

    with torch.no_grad():
        graph = capture_graph(whole, torch.rand(3, 10, 32), *weights, *after)
    found = work_of_last(graph, "_transformer_encoder_layer_fwd")
    assert found.flops == counter.get_total_flops()
    assert found.operations > found.flops
    assert [part.kind for part in found.parts].count("product") == 6
