"""Modality fusion in common models, and its branches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import djinn
from djinn.planning import ExecutionPhase, Modality
from djinn_patterns.multimodal import FusionPoint

DEVICE = "remote_accelerator:0"
WIDTH, WORDS = 16, 10


class Towers(nn.Module):
    """A token embedding and an image convolution, joined by `meet`."""

    def __init__(self, meet, questions=0):
        super().__init__()
        self.meet = meet
        self.table, self.words = nn.Embedding(500, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.patches, self.picture = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, WIDTH)
        self.questions = nn.Parameter(torch.randn(1, questions, WIDTH)) if questions else None

    def forward(self, tokens, pixels):
        words = self.words(self.table(tokens)).relu()
        seen = self.patches(pixels).flatten(2).transpose(1, 2).relu()
        if self.questions is not None:
            seen = F.scaled_dot_product_attention(self.questions.expand(len(seen), -1, -1), seen, seen)
        else:
            seen = self.picture(seen)
        return self.meet(tokens, words, seen)


def masked_scatter(tokens, words, seen):
    return words.masked_scatter((tokens < 4).unsqueeze(-1).expand_as(words), seen)


def overwrite_tokens(tokens, words, seen):
    words[:, :4] = seen[:, :4]
    return words * 2


def concatenate(tokens, words, seen):
    return torch.cat([seen, words], dim=1).softmax(-1)


def cross_attention(tokens, words, seen):
    return F.scaled_dot_product_attention(words, seen, seen)


def eager_cross_attention(tokens, words, seen):
    return torch.softmax(words @ seen.mT / 4, -1) @ seen


def mutual_cross_attention(tokens, words, seen):
    return cross_attention(tokens, words, seen).mean() + cross_attention(tokens, seen, words).mean()


def cosine_similarity(tokens, words, seen):
    one, other = F.normalize(words.mean(1), dim=-1), F.normalize(seen.mean(1), dim=-1)
    return one @ other.T


def add_mean(tokens, words, seen):
    return words + seen.mean(1, keepdim=True)


def example_inputs(device="cpu"):
    return torch.arange(2 * WORDS).view(2, WORDS).to(device), torch.zeros(2, 3, 32, 32).to(device)


def capture_model(meet, questions=0):
    model, inputs = Towers(meet, questions).eval().to(DEVICE), example_inputs(DEVICE)
    with torch.no_grad(), djinn.capture() as recorded:
        result = model(*inputs)
    assert result is not None  # keeps the result alive until here
    return recorded


def match_fusions(recorded):
    graph, pattern = recorded.graph, FusionPoint()
    return list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))


@pytest.mark.parametrize(
    ("meet", "how"),
    [
        (masked_scatter, "scatter"),
        (overwrite_tokens, "scatter"),
        (concatenate, "concatenation"),
        (cross_attention, "cross_attention"),
        (eager_cross_attention, "cross_attention"),
        (cosine_similarity, "similarity"),
        (add_mean, "sum"),
    ],
)
def test_fusion_kind_of_modalities(meet, how):
    (match,) = match_fusions(capture_model(meet))
    assert match.details["how"] == how
    assert set(match.details["kinds"]) == {"text", "vision"}
    assert match.modality is Modality.MULTIMODAL_FUSION


def test_cross_attention_fusion_direction():
    (match,) = match_fusions(capture_model(cross_attention))
    assert match.details["kinds"] == ("text", "vision")
    found = match_fusions(capture_model(mutual_cross_attention))
    assert [m.details["how"] for m in found] == ["cross_attention"] * 2
    assert [m.details["kinds"] for m in found] == [("text", "vision"), ("vision", "text")]


def test_modality_branches_are_independent():
    recorded = capture_model(masked_scatter)
    graph = recorded.graph
    (match,) = match_fusions(recorded)
    text, vision = map(set, match.hints["branches"])
    assert not text & vision
    assert "embedding" in {graph.nodes[n].operation for n in text}
    assert "convolution" in {graph.nodes[n].operation for n in vision}
    assert not any({e.source, e.target} & text and {e.source, e.target} & vision for e in graph.edges)
    after = [n.id for n in graph.nodes if n.id > match.nodes[0]]
    assert not (text | vision) & set(after)


def test_comparison_is_fusion_and_shared_input_is_not():
    profile = capture_model(cosine_similarity).profile
    (match,) = [m for m in profile.patterns if m.pattern == "fusion_point"]
    assert {profile.phases[n] for n in match.nodes} == {ExecutionPhase.MULTIMODAL_FUSION}
    assert match.confidence >= 0.9


def test_single_modality_has_no_fusion():
    layers, (_, pixels) = [nn.Conv2d(3, 8, 3).to(DEVICE) for _ in range(2)], example_inputs(DEVICE)
    with torch.no_grad(), djinn.capture() as recorded:
        first, second = (layer(pixels) for layer in layers)
        torch.cat([first, second], 1).relu()
    assert match_fusions(recorded) == []


def test_combined_masks_are_no_fusion():
    def masked(tokens, words, seen):
        both = torch.cat([tokens > 0, seen.mean(-1) > 0], dim=1)
        return words.sum(), seen.sum(), both

    assert match_fusions(capture_model(masked)) == []


def test_training_step_has_one_fusion():
    model, inputs = Towers(concatenate).to(DEVICE), example_inputs(DEVICE)
    with djinn.capture() as recorded:
        model(*inputs).square().mean().backward()
    (match,) = match_fusions(recorded)
    backward = [n.id for n in recorded.graph.nodes if "_backward" in n.operation]
    assert backward
    assert not any(set(nodes) & set(backward) for nodes in match.hints["branches"])
