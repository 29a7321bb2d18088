"""The pattern `kv_cache`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from djinn.hooks import Pattern
from djinn.planning import (
    FUSED_ATTENTION,
    SOFTMAX,
    DataResidency,
    ExecutionPhase,
    Graph,
    Node,
    PatternMatch,
    chain,
    origin,
)
from djinn_core.planning.matching.attentions import Attention, attentions_of
from djinn_kv_cache.caches import Cache, Caches, Kind
from djinn_kv_cache.tracing import CacheTracer

# How sure each kind is: a value that is merely held after attention read it may be held for another reason.
_CONFIDENCE: dict[Kind, float] = {"appended": 0.98, "written": 0.98, "created": 0.95, "kept": 0.75, "read": 0.7}
_TOLD = {
    "appended": "are appended to a cache from before, which attention reads",
    "written": "are written into a buffer from before, which attention reads",
    "created": "are put into a new cache, which outlives the program",
    "kept": "are read by attention and held after the program, while the queries are not",
    "read": "come from outside, beside attentions with caches",
}


class KeyValueCache(Pattern):
    """Match growing and static KV caches, of fused and unfused attention."""

    name = "kv_cache"
    tolerates_growth = True
    operations = FUSED_ATTENTION | SOFTMAX

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Return one match for each layer's keys and values, no matter how many attentions read them."""
        if candidates:
            first = {match.values: match for match in reversed(_found(graph))}
            yield from map(_match, reversed(first.values()))


@attrs.frozen
class _Found:
    """An attention with the caches of its keys and values."""

    read: Attention
    key: Cache
    value: Cache

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.key.values, *self.value.values)))


def _found(graph: Graph) -> list[_Found]:
    caches = Caches(graph)
    if not (caches.kept or caches.by_storage):
        return []  # nothing outlives the program
    tracing = CacheTracer(graph, caches)
    attentions = [
        _Found(read, key, value)
        for read in graph.flow.shared(attentions_of)
        if (key := tracing.cache(read.key)) and (value := tracing.cache(read.value))
    ]
    certain = any(f.key.grows and f.value.grows for f in attentions)
    return [f for f in attentions if _plausible(graph, f, certain)]


def _plausible(graph: Graph, found: _Found, certain: bool) -> bool:
    """Return True if the keys and values of an attention are probably a KV cache.

    Keys and values that the program only reads count if it has certain caches. If they outlive the program for another
    reason, they count unless the queries outlive it as well.
    """
    kinds = {found.key.kind, found.value.kind}
    if "read" in kinds:
        return certain and kinds == {"read"} and graph.producer(origin(graph, found.read.query)) is not None
    if "kept" in kinds:
        if any("_backward" in operation for operation in graph.by_op):
            return False  # a backward pass has its own reasons to keep them
        return not set(chain(graph, found.read.query)) & set(graph.outputs)
    return True


def _match(found: _Found) -> PatternMatch:
    read, key, value = found.read, found.key, found.value
    decode = read.queries == 1 and key.from_before
    return PatternMatch(
        pattern=KeyValueCache.name,
        nodes=tuple(sorted({*key.nodes, *value.nodes, *read.nodes})),
        confidence=min(_CONFIDENCE[key.kind], _CONFIDENCE[value.kind]),
        reason=f"keys and values of the attention in node {read.nodes[-1]} {_TOLD[key.kind]}; {_counts(read)}",
        hints={"colocate": (found.values,)},
        residency=dict.fromkeys(found.values, DataResidency.STATEFUL_KV_CACHE),
        phase=ExecutionPhase.LLM_DECODE if decode else ExecutionPhase.LLM_PREFILL,
        details={"kind": key.kind, "queries": read.queries, "keys": read.keys},
    )


def _counts(read: Attention) -> str:
    return f"{read.queries} {'query' if read.queries == 1 else 'queries'} over {read.keys} keys"
