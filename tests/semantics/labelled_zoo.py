"""The entries of the labelled zoo, how each is called, and in which half it is.

Models are those of `tests/zoo`, and plain ones of `plain_models`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import attrs
import building
import catalogue
import plain_models
import torch
from catalogue import ZOO
from flop_truth import flops_here
from ground_truth import Labelled, Truth
from instances import Scene, instances
from likeness import to_remote, unsettle
from phase_truth import phases_of, workloads_of
from situations import Call, forward, generation, prefill, train
from torch import nn
from value_truth import caches_in, fusions, modalities_of, residency_of, single

from djinn_core.ir.graph import ProgramGraph

Part = Literal["development", "report"]
REMOTE = "remote_accelerator:0"
VOCABULARY = 640
_SMALL = {99}
_SEED = "2026-11-21"


@attrs.frozen
class Entry:
    """An architecture with the ways in which it is called.

    Attributes:
        family: what it is, in the words of `phase_truth.WORKLOADS`.
        attentions: attentions in a forward pass as its configuration has them; None where that says nothing.
    """

    name: str
    family: str
    situations: tuple[str, ...]
    attentions: int | None = None

    @property
    def part(self) -> Part:
        """Development or report: drawn once by name and seed, so that new entries move no others."""
        digest = hashlib.blake2b(f"{_SEED}:{self.name}".encode(), digest_size=8).digest()
        return "development" if digest[0] % 2 else "report"


LABELLED: dict[str, Entry] = {}
ONCE, WRITES = ("forward", "train"), ("forward", "prefill", "decode", "train")
STATIC = ("forward", "prefill", "decode", "static_decode", "train")


def _enter(family: str, situations: tuple[str, ...], names: str, attentions: int | None = None) -> None:
    for name in names.split():
        LABELLED[name] = Entry(name, family, situations, attentions)


_enter("decoder", STATIC, "gpt2 llama mixtral", 2)
_enter("decoder", WRITES, "bloom", 2)
_enter("recurrent decoder", WRITES, "mamba", 0)
_enter("encoder", ONCE, "bert", 2)
_enter("encoder-decoder", WRITES, "t5", 6)
_enter("vision", ONCE, "vit swin", 2)
_enter("vision", ONCE, "resnet", 0)
_enter("audio", ONCE, "wav2vec2", 2)
_enter("multimodal", ONCE, "clip", 4)
_enter("illustrated decoder", WRITES, "llava", 4)
_enter("diffusion", ONCE, "unet_2d_condition")
_enter("recommender", ONCE, "dlrm", 0)
_enter("generic", ONCE, "lstm", 0)


def labelled(name: str, count_flops: bool = False) -> Iterator[Labelled]:
    """The programs of one entry, with what is true of them."""
    entry = LABELLED[name]
    architecture = ZOO.get(name) or plain_models.PLAIN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        with wide_vocabularies():
            model, inputs = architecture.make()
        unsettle(model)
        flops = {s: flops_here(model, inputs, s) for s in ("forward", "train") if count_flops and s in entry.situations}
        model, inputs = model.to(REMOTE), to_remote(inputs)
        for call in _calls(entry, model, inputs):
            program = call.recorded.captured.program
            yield Labelled(
                name, entry.family, call.situation, program, truth_of(entry, call, model), flops.get(call.situation)
            )


@contextmanager
def wide_vocabularies() -> Iterator[None]:
    """Models have larger vocabularies: those of `tests/zoo` know hardly more words than their inputs have."""

    def wide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: VOCABULARY if k == "vocab_size" and v in _SMALL else wide(v) for k, v in value.items()}
        return value

    def made(module: str, model: str, config: str, **settings: Any) -> nn.Module:
        return pretrained(module, model, config, **wide(settings))

    pretrained = building.pretrained
    modules = [building, *(m for m in vars(catalogue).values() if hasattr(m, "pretrained"))]
    for module in modules:
        module.pretrained = made
    try:
        yield
    finally:
        for module in modules:
            module.pretrained = pretrained


def _calls(entry: Entry, model: nn.Module, inputs: dict[str, object]) -> Iterator[Call]:
    if "forward" in entry.situations:
        yield forward(model, inputs)
    apart = entry.family in {"encoder-decoder", "speech to text", "illustrated decoder"}
    if "prefill" in entry.situations and apart:
        yield prefill(model, inputs)
    if "decode" in entry.situations:
        yield from (call for call in generation(model, inputs) if not apart or call.situation != "prefill")
    if "static_decode" in entry.situations:
        yield from generation(model, inputs, static=True)
    if "train" in entry.situations:
        yield train(model, inputs)


def truth_of(entry: Entry, call: Call, model: nn.Module) -> Truth:
    """What is true of a recorded call."""
    graph, runs, kept = ProgramGraph(call.recorded.captured.program), call.recorded.runs, call.kept
    kinds = modalities_of(graph, kept)
    scene = Scene(graph, runs, *_vocabulary(model))
    decodes = "decode" in call.situation
    found = [*instances(scene), *caches_in(graph, kept)]
    if not decodes:
        required = entry.family in {"multimodal", "illustrated decoder"}
        found += fusions(graph, runs, kinds, kept, required)
    return Truth(
        workloads=workloads_of(entry.family, call.situation),
        phases=phases_of(entry.family, call.situation, len(graph.nodes), runs, kinds),
        modalities={} if decodes or entry.family == "diffusion" else single(kinds),
        residency=residency_of(graph, kept),
        instances=tuple(found),
    )


def _vocabulary(model: nn.Module) -> tuple[nn.Module | None, frozenset[int] | None]:
    """The module that makes logits over the vocabulary, and the identities of those that look tokens up."""
    if not hasattr(model, "get_output_embeddings"):
        return None, None
    tables = set()
    for module in model.modules():
        if hasattr(module, "get_input_embeddings"):
            try:
                tables.add(id(module.get_input_embeddings()))
            except (NotImplementedError, AttributeError):
                continue  # a part that takes no tokens
    return model.get_output_embeddings(), frozenset(tables)


__all__ = ["LABELLED", "Entry", "Part", "labelled"]
