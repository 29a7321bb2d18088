"""Models of the zoo: small, built from configurations, with matching inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn

Inputs = dict[str, Any]
Make = Callable[[], tuple[nn.Module, Inputs]]

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = SIZES | {
    "vocab_size": 99,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = SIZES | {"image_size": 32, "patch_size": 8}


@attrs.frozen
class Architecture:
    """One entry of the zoo.

    Attributes:
        make: function that builds the model and its inputs from the current random state.
        writes: True if the model has a `generate()` that continues its inputs.
    """

    name: str
    kind: str
    make: Make
    writes: bool = False


ZOO: dict[str, Architecture] = {}


def architecture(kind: str, writes: bool = False) -> Callable[[Make], Make]:
    """Decorator: add the function to the zoo, by its name."""

    def register(make: Make) -> Make:
        ZOO[make.__name__] = Architecture(make.__name__, kind, make, writes)
        return make

    return register


def pretrained(module: str, model: str, config: str, **settings: Any) -> nn.Module:
    """Return a model of transformers, imported by name, because the package's lookup imports far more."""
    package = f"transformers.models.{module}"
    make = getattr(importlib.import_module(f"{package}.modeling_{module}"), model)
    return make(getattr(importlib.import_module(f"{package}.configuration_{module}"), config)(**settings))


def row(
    kind: str,
    module: str,
    prefix: str,
    head: str,
    inputs: Callable[[], Inputs],
    config: str = "",
    writes: bool = False,
    **settings: Any,
) -> None:
    """Add an entry with the usual class names: `{prefix}{head}` and `{prefix}Config` (or `config`)."""

    def make() -> tuple[nn.Module, Inputs]:
        return pretrained(module, f"{prefix}{head}", config or f"{prefix}Config", **settings), inputs()

    ZOO[module] = Architecture(module, kind, make, writes)


def words(seed: int = 0, length: int = 10) -> torch.Tensor:
    """Return two sequences of token ids between 3 and 89."""
    return torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normally distributed numbers, independent of the random state."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text() -> Inputs:
    """Return tokens with labels."""
    return {"input_ids": words(), "labels": words(1)}


def padded_text() -> Inputs:
    """Return tokens with labels; the second sequence is shorter."""
    return text() | {"attention_mask": (torch.arange(10) < torch.tensor([[10], [7]])).long()}


def labelled_image() -> Inputs:
    """Return two images with their class numbers."""
    return {"pixel_values": numbers(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
