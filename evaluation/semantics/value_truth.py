"""Ground truth of values: lifetimes, source inputs, caches, and fusion points of modalities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from djinn.compat import LazyTensor
from djinn.planning import DataResidency, Graph, Modality, storage_of
from evaluation.semantics.ground_truth import Instance, ModuleRun
from evaluation.semantics.module_runs import ancestors

_MODALITIES = (
    ("pixel", Modality.VISION), ("image_grid", Modality.VISION), ("input_features", Modality.AUDIO),
    ("input_values", Modality.AUDIO), ("input_ids", Modality.TEXT), ("attention_mask", Modality.TEXT),
    ("token_type_ids", Modality.TEXT), ("decoder_attention_mask", Modality.TEXT),
)  # fmt: skip


@attrs.frozen
class RetainedTensors:
    """Labels of storages with a known purpose.

    Attributes:
        residency: residency by storage.
        caches: for each layer with a cache, the storages of its keys and values, with the layer's number.
        states: storages of other decode states, such as those of state-space layers.
        modalities: modality of each input storage.
    """

    residency: dict[int, DataResidency] = attrs.field(factory=dict)
    caches: dict[frozenset[int], int] = attrs.field(factory=dict)
    states: set[int] = attrs.field(factory=set)
    modalities: dict[int, Modality] = attrs.field(factory=dict)

    def model(self, model: nn.Module) -> None:
        """Label parameters and buffers as weights, and their gradients."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._put(tensor, DataResidency.PERSISTENT_WEIGHT)
        for parameter in model.parameters():
            self._put(parameter.grad, DataResidency.GRADIENT)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Label the state of an optimizer."""
        for state in optimizer.state.values():
            for tensor in state.values():
                self._put(tensor, DataResidency.OPTIMIZER_STATE)

    def inputs(self, inputs: Mapping[str, Any]) -> None:
        """Label the inputs of the model with their modalities."""
        for name, value in inputs.items():
            for tensor in tensors_in(value):
                storage = storage_in(tensor)
                self.residency.setdefault(storage, DataResidency.INPUT)
                kind = next((kind for part, kind in _MODALITIES if part in name), None)
                if kind is not None:
                    self.modalities[storage] = kind

    def cache(self, cache: Any) -> None:
        """Label a cache of transformers: keys and values by layer, and other states."""
        for part in ("self", "cross"):
            if hasattr(cache, f"{part}_attention_cache"):
                self.cache(getattr(cache, f"{part}_attention_cache"))
        for number, layer in enumerate(getattr(cache, "layers", ())):
            references = keys_and_values(layer)
            if references:
                self.caches[references] = number
            for value in vars(layer).values():
                for tensor in tensors_in(value):
                    self._put(tensor, DataResidency.STATEFUL_KV_CACHE)
                    if storage_in(tensor) not in references:
                        self.states.add(storage_in(tensor))

    def _put(self, value: Any, residency: DataResidency) -> None:
        for tensor in tensors_in(value):
            self.residency[storage_in(tensor)] = residency


def keys_and_values(layer: Any) -> frozenset[int]:
    """Return the storages of a cache layer's keys and values, or of their quantized form. An empty layer has none."""
    pair = [getattr(layer, name, None) for name in ("_quantized_keys", "_quantized_values")]
    if any(part is None for part in pair):
        pair = [getattr(layer, name, None) for name in ("keys", "values")]
    firsts = [next(tensors_in(part), None) for part in pair]
    return (
        frozenset(storage_in(t) for t in firsts if t is not None and t.numel())
        if all(t is not None and t.numel() for t in firsts)
        else frozenset()
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the remote tensors in nested lists, tuples and mappings."""
    if isinstance(value, LazyTensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def storage_in(tensor: Any) -> int:
    """Return the storage number of a remote tensor."""
    return storage_of(tensor.remote.handle)


def residency_of(graph: Graph, kept: RetainedTensors) -> dict[int, DataResidency]:
    """Return the residency by value, for known inputs and all results that are not views."""
    inputs = {storage_of(v) for v in graph.inputs}
    results = {v: kept.residency[storage_of(v)] for v in graph.inputs if storage_of(v) in kept.residency}
    visited = set(inputs)
    for node in graph.nodes:
        for value in node.outputs:
            if storage_of(value) not in visited:
                visited.add(storage_of(value))
                results[value] = kept.residency.get(storage_of(value), DataResidency.EPHEMERAL_ACTIVATION)
    return results


def caches_in(graph: Graph, kept: RetainedTensors) -> Iterator[Instance]:
    """Yield one instance for each layer whose cache the program uses. Instances of other states are optional."""
    users = defaultdict(set)
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            users[storage_of(value)].add(node.id)
    for pair, number in kept.caches.items():
        core = frozenset(n for storage in pair for n in users[storage])
        if core:
            span = frozenset(range(len(graph.nodes)))
            yield Instance("kv_cache", core, span, values=pair, where=f"layer {number}")
    for storage in kept.states:
        core = frozenset(users[storage])
        yield Instance("kv_cache", core, core, values=frozenset({storage}), required=False, where="state")


def modalities_of(graph: Graph, kept: RetainedTensors) -> dict[int, frozenset[Modality]]:
    """Return the modalities of the inputs on which a node depends, by node. Nodes without such inputs are left out."""
    carried: dict[int, frozenset[Modality]] = {s: frozenset({m}) for s, m in kept.modalities.items()}
    results: dict[int, frozenset[Modality]] = {}
    for node in graph.nodes:
        kinds = frozenset().union(*(carried.get(storage_of(v), frozenset()) for v in node.inputs))
        if kinds:
            results[node.id] = kinds
            for value in (*node.outputs, *node.writes):
                carried[storage_of(value)] = carried.get(storage_of(value), frozenset()) | kinds
    return results


def meetings(graph: Graph, kinds: Mapping[int, frozenset[Modality]], kept: RetainedTensors) -> list[int]:
    """Return the nodes that combine modalities, none of whose operands already combines them."""
    carried: dict[int, frozenset[Modality]] = {s: frozenset({m}) for s, m in kept.modalities.items()}
    results = []
    for node in graph.nodes:
        before = [carried.get(storage_of(v), frozenset()) for v in node.inputs]
        if len(kinds.get(node.id, ())) > 1 and all(len(b) < 2 for b in before):
            results.append(node.id)
        for value in (*node.outputs, *node.writes):
            carried[storage_of(value)] = carried.get(storage_of(value), frozenset()) | kinds.get(node.id, frozenset())
    return results


def fusions(
    graph: Graph,
    runs: Sequence[ModuleRun],
    kinds: Mapping[int, frozenset[Modality]],
    kept: RetainedTensors,
    required: bool,
) -> Iterator[Instance]:
    """Yield an instance for each innermost module with nodes of `meetings`. `required`: True if a miss is an error."""
    by_run: dict[int | None, list[int]] = defaultdict(list)
    for node in meetings(graph, kinds, kept):
        by_run[_innermost(runs, node)].append(node)
    for run, nodes in by_run.items():
        span = frozenset(runs[run].span) if run is not None else frozenset(range(len(graph.nodes)))
        where = runs[run].path if run is not None else ""
        yield Instance("fusion", frozenset(nodes), span | frozenset(nodes), required=required, where=where)


def _innermost(runs: Sequence[ModuleRun], node: int) -> int | None:
    inside = [i for i, run in enumerate(runs) if node in run.span]
    return max(inside, key=lambda i: len(list(ancestors(runs, i))), default=None)


def single(kinds: Mapping[int, Iterable[Modality]]) -> dict[int, Modality]:
    """Return the modality of each node, or `MULTIMODAL_FUSION` for several modalities."""
    return {n: next(iter(k)) if len(list(k)) == 1 else Modality.MULTIMODAL_FUSION for n, k in kinds.items()}
