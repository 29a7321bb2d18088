"""Annotation of real architectures through torch.export: their phases, residency and roles."""

from __future__ import annotations

import functools
import itertools
import logging

import attrs
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from djinn.hooks import Pattern
from djinn.planning import fx_graph
from djinn.testing import ProgramBuilder
from djinn_core.ir.handles import storage_of
from djinn_core.ir.profile import DataResidency, ExecutionPhase, Modality, PatternMatch, WorkloadType
from djinn_core.planning.stages.annotate import annotate
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection

WEIGHT = DataResidency.PERSISTENT_WEIGHT
TEXT = {
    "vocab_size": 3000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@functools.cache
def patterns():
    return load_registry(Selection(plugins=("attention", "kv_cache")), builtins=builtin_plugins()).patterns


def annotate_module(module, *inputs):
    with torch.no_grad():
        graph = fx_graph(torch.export.export(module.eval(), inputs))
    return graph, annotate(graph, patterns())


def ids(length=6):
    return torch.zeros(1, length, dtype=torch.long)


class WithCache(nn.Module):
    """A causal model whose cache is input and output, as between two recorded programs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, *past):
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        out = self.model(tokens, past_key_values=cache, use_cache=True)
        return out.logits, [t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)]


def llama(implementation):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, num_key_value_heads=1, attn_implementation=implementation))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("tokens", "phase"), [(6, ExecutionPhase.LLM_PREFILL), (1, ExecutionPhase.LLM_DECODE)])
def test_language_model_prefill_and_decode(implementation, tokens, phase):
    past = () if tokens > 1 else (torch.rand(1, 1, 6, 16), torch.rand(1, 1, 6, 16))
    graph, profile = annotate_module(WithCache(llama(implementation)), ids(tokens), *past)
    assert profile.workload is WorkloadType.LLM
    assert profile.phase is phase
    assert profile.pattern_counts() == {"attention": 1, "kv_cache": 1}
    caches = [v for v, r in profile.residency.items() if r is DataResidency.STATEFUL_KV_CACHE]
    assert set(graph.outputs[:2]) <= set(caches)
    weights = [v for v, r in profile.residency.items() if r is WEIGHT]
    assert len([v for v in weights if len(graph.meta(v).shape) == 2]) == 9  # seven projections, embedding, head


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**TEXT)), ids()


def resnet():
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ), pixels()


def vit():
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**IMAGE)), pixels()


def text_tower():
    """Return CLIP's text tower. It is causal, but returns only the row of the end token."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(**TEXT)), ids()


def sensors():
    return nn.Sequential(nn.Conv1d(4, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(80, 16), nn.Linear(16, 2)), torch.rand(
        1, 4, 10
    )


def clip():
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig(text_config=TEXT, vision_config=IMAGE)), ids(), pixels()


def pixels():
    return torch.zeros(1, 3, 32, 32)


def causal_without_cache():
    class NoCache(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = llama("sdpa")

        def forward(self, tokens):
            return self.model(tokens, use_cache=False).logits

    return NoCache(), ids()


def perceptron():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(3, 4)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, 4) for _ in range(4))
        self.top = nn.Linear(16, 1)

    def forward(self, features):
        return self.top(torch.cat([t(features[:, i]) for i, t in enumerate(self.tables)], -1))


def recommender():
    return Recommender(), torch.zeros(5, 4, dtype=torch.long)


class EncoderEmbeddings(nn.Module):
    """The part of BERT before its check of the mask, which ends a program."""

    def __init__(self):
        super().__init__()
        self.words, self.positions, self.kinds = nn.Embedding(1000, 4), nn.Embedding(64, 4), nn.Embedding(2, 4)

    def forward(self, tokens):
        return self.words(tokens) + self.positions(torch.arange(5)) + self.kinds(torch.zeros_like(tokens))


def encoder_embeddings():
    return EncoderEmbeddings(), torch.zeros(2, 5, dtype=torch.long)


def speech():
    return nn.Sequential(
        nn.Conv1d(1, 8, 10, 5), nn.GELU(), nn.Conv1d(8, 8, 3, 2), nn.Flatten(), nn.Linear(8 * 19, 4)
    ), torch.rand(1, 1, 200)


@pytest.mark.parametrize(
    ("make", "workload", "modality"),
    [
        (bert, WorkloadType.GENERIC, Modality.TEXT),
        (resnet, WorkloadType.VISION, Modality.VISION),
        (vit, WorkloadType.VISION, Modality.VISION),
        (clip, WorkloadType.MULTIMODAL, Modality.MULTIMODAL_FUSION),
        (causal_without_cache, WorkloadType.LLM, Modality.TEXT),
        (perceptron, WorkloadType.GENERIC, Modality.UNKNOWN),
        (recommender, WorkloadType.RECOMMENDER, Modality.TEXT),
        (encoder_embeddings, WorkloadType.GENERIC, Modality.TEXT),
        (speech, WorkloadType.AUDIO, Modality.AUDIO),
        (text_tower, WorkloadType.GENERIC, Modality.TEXT),
        (sensors, WorkloadType.GENERIC, Modality.UNKNOWN),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_workload_type_and_modality(make, workload, modality):
    _, profile = annotate_module(*make())
    assert profile.workload is workload, profile.reasons
    assert profile.modalities[-1] is modality
    assert profile.reasons[0]


def test_multimodal_branches_keep_modality():
    _, profile = annotate_module(*clip())
    assert {Modality.TEXT, Modality.VISION, Modality.MULTIMODAL_FUSION} <= set(profile.modalities)
    assert ExecutionPhase.VISION_ENCODING in profile.phases
    assert profile.phases[-1] is ExecutionPhase.MULTIMODAL_FUSION


def training_step():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    names = [name for name, _ in model.named_parameters()]

    def step(weights, moments, x, y):
        weights = [w.detach().requires_grad_() for w in weights]
        out = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x,))
        gradients = torch.autograd.grad(nn.functional.cross_entropy(out, y), weights)
        with torch.no_grad():
            for weight, moment, gradient in zip(weights, moments, gradients, strict=True):
                moment.mul_(0.9).add_(gradient)
                weight.sub_(moment * 0.1)
        return gradients

    weights = [p.detach() for p in model.parameters()]
    inputs = weights, [torch.zeros_like(w) for w in weights], torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    return fx_graph(make_fx(step, tracing_mode="fake")(*inputs))


def test_training_residency_of_weights_gradients_and_state():
    graph = training_step()
    profile = annotate(graph, patterns())
    assert profile.workload is WorkloadType.TRAINING
    kinds = {node.operation: phase for node, phase in zip(graph.nodes, profile.phases, strict=True)}
    assert kinds["convolution"] is kinds["nll_loss_forward"] is ExecutionPhase.TRAINING_FORWARD
    assert kinds["threshold_backward"] is kinds["convolution_backward"] is ExecutionPhase.TRAINING_BACKWARD
    assert kinds["mul_"] is ExecutionPhase.TRAINING_OPTIMIZER
    assert [k for k, _ in itertools.groupby(profile.phases)] == [
        ExecutionPhase.TRAINING_FORWARD, ExecutionPhase.TRAINING_BACKWARD, ExecutionPhase.TRAINING_OPTIMIZER
    ]  # fmt: skip
    counts = {r: list(profile.residency.values()).count(r) for r in DataResidency}
    assert counts[WEIGHT] == 4
    assert counts[DataResidency.OPTIMIZER_STATE] == 4
    gradients = {storage_of(v) for v, r in profile.residency.items() if r is DataResidency.GRADIENT}
    assert len(gradients) == 4
    assert counts[DataResidency.INPUT] == 2
    assert {"backward", "convolution", "projection"} <= set(profile.roles.values())


@attrs.define
class ClaimingPattern(Pattern):
    """A pattern that returns `claim` as its match, or raises it."""

    name: str
    claim: object
    operations: frozenset[str] = frozenset({"tanh"})

    def match(self, graph, candidates):
        del graph
        assert all(c.operation == "tanh" for c in candidates)
        if isinstance(self.claim, Exception):
            raise self.claim
        return [self.claim]


def tanh():
    builder = ProgramBuilder()
    builder.op("aten::neg", builder.op("aten::tanh", builder.input(3), shape=(3,)), shape=(3,))
    return builder.graph()


def match(name="m", confidence=0.5, **more):
    return PatternMatch(name, (0,), confidence, "because", **more)


@pytest.mark.parametrize(
    "claim", [RuntimeError("no"), match(residency={99: WEIGHT}), attrs.evolve(match(), nodes=(7,)), "a string"]
)
def test_failing_pattern_is_named_and_skipped(claim, caplog):
    profile = annotate(tanh(), [ClaimingPattern("bad", claim), ClaimingPattern("good", match("good"))])
    assert [m.pattern for m in profile.patterns] == ["good"]
    assert "pattern 'bad'" in profile.reasons[-1]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING and "bad" in r.getMessage()]) == 1


def test_most_confident_match_decides():
    sure = match("sure", 0.9, phase=ExecutionPhase.LLM_DECODE)
    unsure = match("unsure", 0.2, phase=ExecutionPhase.LLM_PREFILL)
    never = ClaimingPattern("never", AssertionError("asked"), frozenset({"mm"}))
    profile = annotate(tanh(), [ClaimingPattern("a", unsure), ClaimingPattern("b", sure), never])
    assert [m.pattern for m in profile.patterns] == ["sure", "unsure"]
    assert profile.phases[0] is ExecutionPhase.LLM_DECODE
    assert profile.roles[0] == "sure"
    assert len(profile.reasons) == 1


def test_recorded_and_exported_models_have_equal_annotations():
    model = perceptron()[0].eval()
    x = torch.rand(3, 4)
    exported = annotate(fx_graph(torch.export.export(model, (x,))), ())

    def run(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    traced = annotate(fx_graph(make_fx(run, tracing_mode="fake")(dict(model.named_parameters()), x)), ())
    assert exported.workload is traced.workload
    assert sorted(exported.residency.values()) == sorted(traced.residency.values())
    assert sorted(set(exported.roles.values())) == sorted(set(traced.roles.values()) - {"view"})
