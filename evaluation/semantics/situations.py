"""Ways to call a model: a forward pass, prefill, a decode step with a growing or a static cache, a training step.

Each way gives one recorded program, labelled by the harness.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from djinn.planning import Modality
from evaluation.semantics.ground_truth import ModuleRun
from evaluation.semantics.module_runs import ModuleRuns, recording
from evaluation.semantics.value_truth import RetainedTensors, storage_in, tensors_in
from evaluation.zoo.likeness import loss_of

SEED = 1
_CACHES = ("past_key_values", "cache_params")
_NOT_FOR_FORWARD = ("labels", "return_loss", "future_values", "future_time_features")


@attrs.frozen
class Call:
    """One recorded call of a model, with labels of its storages (`kept`)."""

    situation: str
    recorded: ModuleRuns
    kept: RetainedTensors


def forward(model: nn.Module, inputs: Mapping[str, Any]) -> Call:
    """Return the recording of a forward pass in evaluation mode, without a cache."""
    model.eval()
    input_tensor = without_labels(model, inputs)
    with torch.no_grad(), recording(model) as recorded:
        output = model(**input_tensor)
    return _known("forward", recorded, model, input_tensor, output)


def without_labels(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs without a cache, and without labels unless `forward` needs them. Decoders read labels as inputs."""
    takes = _parameters(model)
    needs_labels = "labels" in takes and takes["labels"].default is inspect.Parameter.empty
    options = {
        name: v for name, v in inputs.items() if name not in _NOT_FOR_FORWARD or (name == "labels" and needs_labels)
    }
    if "labels" in inputs and "decoder_input_ids" in takes:
        options["decoder_input_ids"] = inputs["labels"]
    return options | without_cache(model)


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return the argument that disables the cache of a model that generates text."""
    return {"use_cache": False} if hasattr(model, "generate") or "use_cache" in _parameters(model) else {}


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def prefill(model: nn.Module, inputs: Mapping[str, Any]) -> Call:
    """Return the recording of a first call of all parts of a model, including encoders and towers, which makes a cache."""
    model.eval()
    input_tensor = without_labels(model, inputs) | {"use_cache": True}
    with torch.no_grad(), recording(model) as recorded:
        output = model(**input_tensor)
    return _known("prefill", recorded, model, input_tensor, output)


def train(model: nn.Module, inputs: Mapping[str, Any]) -> Call:
    """Return the recording of the second training step. The first step makes the optimizer's state."""
    model.train()
    torch.manual_seed(SEED)
    optimizer = optimizer_of(model)
    backward(model, inputs)
    optimizer.step()
    optimizer.zero_grad()
    with recording(model) as recorded:
        backward(model, inputs, recorded)
        recorded.mark("optimizer")
        optimizer.step()
    call = _known("train", recorded, model, inputs, None)
    call.kept.optimizer(optimizer)
    return call


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer for a model."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def backward(model: nn.Module, inputs: Mapping[str, Any], recorded: ModuleRuns | None = None) -> None:
    """Run forward pass, loss and backward pass."""
    loss = loss_of(model(**inputs, **without_cache(model)))
    if recorded is not None:
        recorded.mark("backward")
    loss.backward()


# options of `generate()`; not every configuration has `use_cache`
GENERATION: Mapping[str, Any] = {
    "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": True
}  # fmt: skip
# options of `generate()` for other caches, by the name of the step
_OF_CACHES: Mapping[str, Mapping[str, Any]] = {
    "static_decode": {"cache_implementation": "static", "disable_compile": True},
    "quantised_decode": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
}


def generation(model: nn.Module, inputs: Mapping[str, Any], name: str = "decode") -> Iterator[Call]:
    """Yield recordings of prefill and second decode step in `generate()`. For a name in `_OF_CACHES`, omit prefill.

    This prefill lacks encoders and towers, because `generate()` calls them separately. The function `prefill` has them.
    """
    model.eval()
    options = {**GENERATION, **_OF_CACHES.get(name, {})}
    settings = {name: value for name, value in inputs.items() if name not in {"labels", "use_cache"}}
    with _each_forward(model) as calls:
        model.generate(**settings, **options)
    names = {2: name} if name in _OF_CACHES else {0: "prefill", 2: "decode"}
    for index, situation in names.items():
        yield attrs.evolve(calls[index], situation=situation)


def eagerly(model: nn.Module, inputs: Mapping[str, Any], writes: bool) -> Iterator[Call]:
    """Yield the recording of a forward pass with decomposed attention, and of a decode step if the model generates text."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    yield attrs.evolve(forward(model, inputs), situation="eager_forward")
    if writes:
        yield from (
            attrs.evolve(call, situation="eager_decode")
            for call in generation(model, inputs)
            if call.situation == "decode"
        )
    model.set_attn_implementation(before)


@contextmanager
def _each_forward(model: nn.Module) -> Iterator[list[Call]]:
    """Record every forward pass of `model` inside the block."""
    calls: list[Call] = []
    original: Callable[..., Any] = model.forward

    @functools.wraps(original)
    def recorded_forward(*args: Any, **kwargs: Any) -> Any:
        before = RetainedTensors()
        for name in _CACHES:
            before.cache(kwargs.get(name))
        with recording(model) as recorded:
            output = original(*args, **kwargs)
        # The model's own hook ran before this function.
        for run in recorded.runs:
            run.parent = 0 if run.parent is None else run.parent + 1
        recorded.runs.insert(0, ModuleRun(model, "", 0, len(recorded.captured.program), None))
        call = _known("", recorded, model, kwargs, output)
        call.kept.residency.update(before.residency)
        calls.append(call)
        return output

    model.forward = recorded_forward  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        del model.forward


def _known(situation: str, recorded: ModuleRuns, model: nn.Module, given: Mapping[str, Any], output: Any) -> Call:
    retained = RetainedTensors()
    names = {"past_key_values", "cache_params", "encoder_outputs", "state"}
    retained.inputs({name: value for name, value in given.items() if name not in names})
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):  # its decoder reads them, shifted by one
        retained.modalities.update(dict.fromkeys(map(storage_in, tensors_in(given.get("labels"))), Modality.TEXT))
    retained.model(model)
    sources = (given, output if isinstance(output, Mapping) else {})
    caches = {id(cache): cache for source in sources for name in _CACHES if (cache := source.get(name)) is not None}
    for cache in caches.values():
        retained.cache(cache)
    return Call(situation, recorded, retained)
