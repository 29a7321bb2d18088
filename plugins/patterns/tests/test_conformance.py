from __future__ import annotations

import pytest
import torch
from torch import nn

import djinn
from djinn.testing import PatternConformance, PluginConformance
from djinn_patterns import multimodal, recommender, transformer

PLUGINS = {"multimodal": multimodal, "recommender": recommender, "transformer": transformer}
PATTERNS = {pattern.name: pattern for plugin in PLUGINS.values() for pattern in plugin.djinn_register_patterns()}


def make_image_text_model():
    """Return a model that replaces token embeddings with image features."""
    with torch.no_grad(), torch.device("remote_accelerator:0"):
        table, patches, layer = nn.Embedding(500, 16), nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 16)
        tokens, pixels = torch.zeros(2, 10, dtype=torch.int64), torch.zeros(2, 3, 32, 32)
        with djinn.capture() as captured:
            words, seen = table(tokens), layer(patches(pixels).flatten(2).transpose(1, 2))
            result = words.masked_scatter((tokens < 4).unsqueeze(-1).expand_as(words), seen)
    assert result is not None  # keeps the result alive until here
    return captured.graph


# Other patterns are matched in whole models, in the tests of their plugins.
RECOGNISED = {
    "fusion_point": make_image_text_model,
}


class TestPlugin(PluginConformance):
    @pytest.fixture(params=sorted(PLUGINS))
    def plugin(self, request):
        return PLUGINS[request.param]


class TestPattern(PatternConformance):
    @pytest.fixture(params=sorted(PATTERNS))
    def pattern(self, request):
        return PATTERNS[request.param]

    @pytest.fixture
    def recognised(self, pattern):
        make = RECOGNISED.get(pattern.name)
        return {pattern.name: make()} if make else {}
