"""Each tier judges alone, the structure without names; one model is the same through capture, torch.fx and torch.export."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

import djinn
from djinn.planning import Lineage, Tier, WorkloadType, fx_graph
from djinn_core.ir.graph import Graph
from djinn_core.planning.stages.annotate import annotate
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection


class Pictures(nn.Module):
    """A small image model whose class name says what it is."""

    def __init__(self):
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 8, 3), nn.ReLU()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.act(self.stem(x)).flatten(2).transpose(1, 2)
        q, k, v = (p(x)[:, None] for p in (self.query, self.key, self.value))
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


def captured_graph(model, x):
    with djinn.capture() as captured, torch.no_grad():
        output = model.to("remote_accelerator:0")(x.to("remote_accelerator:0"))
    assert output.shape == (2, 4)
    return captured.graph


MAKERS = {
    "export": lambda model, x: fx_graph(torch.export.export(model, (x,))),
    "fx": lambda model, x: fx_graph(torch.fx.symbolic_trace(model), x),
    "module": fx_graph,
    "capture": captured_graph,
}


@pytest.fixture(scope="module")
def patterns():
    return load_registry(Selection(plugins=("attention", "kv_cache")), builtins=builtin_plugins()).patterns


def test_model_is_recognised_from_any_graph(patterns):
    said = {}
    for name, make in MAKERS.items():
        model = Pictures().eval()  # paths are those of a model that is there
        graph = make(model, torch.rand(2, 3, 6, 6))
        profile = annotate(graph, patterns)
        (attention,) = (m for m in profile.patterns if m.pattern == "attention")
        looks = graph.flow.pass_through
        computing = [
            (
                n.operation.removeprefix("_").replace("convolution", "conv2d"),
                profile.phases[n.id],
                profile.modalities[n.id],
            )
            for n in graph.nodes
            if not looks[n.id] and not n.operation.startswith("empty")
        ]
        said[name] = (profile.workload, computing, dict(attention.details), graph.nodes[-1].module)
    assert said["fx"] == said["export"] == said["capture"]


def test_structure_tier_ignores_names(patterns):
    model = Pictures().eval()
    graph = captured_graph(model, torch.rand(2, 3, 6, 6))
    assert "Pictures" in graph.module_names.classes
    bare = Graph(attrs.evolve(graph.program, modules=(), sites=()))
    assert not bare.module_names.classes
    structure = frozenset({Tier.STRUCTURE})
    assert annotate(bare, patterns, tiers=structure) == annotate(graph, patterns, tiers=structure)


@pytest.mark.parametrize("tier", list(Tier))
def test_each_recognition_tier_works_alone(tier, patterns):
    model = Pictures().eval()
    graph = captured_graph(model, torch.rand(2, 3, 6, 6))
    profile = annotate(graph, patterns, tiers=frozenset({tier}))
    assert profile.workload is WorkloadType.VISION, profile.reasons
    assert profile.lineage[-1] == Lineage.WEIGHT | Lineage.VISION


def test_known_residency_marks_optimizer_step():
    from djinn.planning import DataResidency, ExecutionPhase
    from djinn.testing import ProgramBuilder

    builder = ProgramBuilder()
    weight, gradient = builder.input(4, 4), builder.input(4, 4)
    builder.op("aten::mm", builder.input(2, 4), weight, shape=(2, 4))
    builder.inplace("aten::add_.Tensor", weight, gradient, slots=(-0.1,))
    graph = builder.graph()
    assert annotate(graph, ()).workload is WorkloadType.GENERIC
    profile = annotate(graph, (), known={gradient: DataResidency.GRADIENT})
    assert profile.workload is WorkloadType.TRAINING
    assert profile.phases[-1] is ExecutionPhase.TRAINING_OPTIMIZER
    assert profile.residency[gradient] is DataResidency.GRADIENT


class CLIPTextModel(nn.Module):
    """A text model with three embedding tables and the class name of CLIP's text tower."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(size, 8) for size in (1000, 6, 2)])
        self.layer, self.mixed = nn.Linear(8, 8), nn.Conv1d(8, 8, 3, padding=1, groups=8)

    def forward(self, tokens):
        words, places, segments = self.tables
        x = words(tokens) + places(torch.arange(6)) + segments(torch.zeros_like(tokens))
        return self.layer(self.mixed(self.layer(x).transpose(1, 2)).transpose(1, 2))


def test_text_model_with_three_embeddings(patterns):
    """Cover FNet (three tables, no attention), Nystroemformer (with convolution) and CLIP's text tower."""
    with djinn.capture(model := CLIPTextModel()) as captured:
        model(torch.zeros(2, 6, dtype=torch.long))
    assert "CLIPTextModel" in captured.graph.module_names.classes
    assert annotate(captured.graph, patterns).workload is WorkloadType.GENERIC


class Autoencoder(nn.Module):
    """A convolutional encoder and decoder."""

    def __init__(self, channels):
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 4, 1))
        self.draw = nn.Sequential(
            nn.Conv2d(4, 8, 3, 1, 1), nn.Upsample(scale_factor=2), nn.Conv2d(8, channels, 3, 1, 1)
        )

    def forward(self, x):
        return self.draw(self.see(x))


@pytest.mark.parametrize(("channels", "draws"), [(3, True), (2, False)])
def test_image_generation_differs_from_segmentation(channels, draws):
    from djinn.planning import ExecutionPhase

    graph = fx_graph(torch.export.export(Autoencoder(channels).eval(), (torch.rand(1, 3, 16, 16),)))
    profile = annotate(graph, ())
    drawn = {
        graph.nodes[i].module.split(".")[0] for i, p in enumerate(profile.phases) if p is ExecutionPhase.VISION_DECODING
    }
    assert drawn == ({"draw"} if draws else set())


class CausalLayer(nn.Module):
    """A causal attention layer over patches of eight numbers, or over hidden states of an earlier program."""

    def __init__(self, width):
        super().__init__()
        self.enter = nn.Linear(8, 16) if width == 8 else nn.Identity()
        self.query, self.key, self.value, self.last = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        x = self.enter(x.unflatten(1, (-1, 8)) / x.std() if x.dim() == 2 else x)
        q, k, v = (p(x)[:, None] for p in (self.query, self.key, self.value))
        return x + self.last(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


@pytest.mark.parametrize(
    ("given", "width", "workload"), [((2, 64), 8, WorkloadType.GENERIC), ((2, 8, 16), 16, WorkloadType.LLM)]
)
def test_patched_time_series_is_not_text(given, width, workload, patterns):
    """Cover TimesFM, whose decoder equals a language model's. A program that starts at hidden states is text."""
    graph = fx_graph(torch.export.export(CausalLayer(width).eval(), (torch.rand(given),)))
    assert annotate(graph, patterns, tiers=frozenset({Tier.STRUCTURE})).workload is workload


@pytest.mark.parametrize(("channels", "workload"), [(4, WorkloadType.GENERIC), (1, WorkloadType.AUDIO)])
def test_few_channel_series_is_not_audio(channels, workload):
    """Cover the input of a temporal convolutional network."""
    model = nn.Sequential(nn.Conv1d(channels, 16, 3), nn.ReLU(), nn.Conv1d(16, 16, 3), nn.ReLU(), nn.Conv1d(16, 2, 1))
    graph = fx_graph(torch.export.export(model.eval(), (torch.rand(2, channels, 32),)))
    assert annotate(graph, (), tiers=frozenset({Tier.STRUCTURE})).workload is workload
