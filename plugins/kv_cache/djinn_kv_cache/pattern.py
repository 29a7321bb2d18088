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

# Confidence by kind. A value that only outlives the program may do so for a reason other than caching.
_CONFIDENCE: dict[Kind, float] = {"appended": 0.98, "written": 0.98, "created": 0.95, "kept": 0.75, "read": 0.7}
_DESCRIPTIONS = {
    "appended": "are appended to a cache of an earlier program, and attention reads the result",
    "written": "are written into a buffer of an earlier program, which attention reads",
    "created": "are put into a new cache, which outlives the program",
    "kept": "are read by attention and outlive the program, unlike the queries",
    "read": "are program inputs, and other attentions of the program have caches",
}


class KeyValueCache(Pattern):
    """Match growing and static KV caches, of fused and unfused attention."""

    name = "kv_cache"
    tolerates_growth = True
    operations = FUSED_ATTENTION | SOFTMAX

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Yield a match for each pair of key and value caches, no matter how many attentions read them."""
        if candidates:
            first = {match.values: match for match in reversed(_attentions_with_caches(graph))}
            yield from map(_match, reversed(first.values()))


@attrs.frozen
class _CachedAttention:
    """An attention with the caches of its keys and values."""

    attention: Attention
    key: Cache
    value: Cache

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.key.values, *self.value.values)))


def _attentions_with_caches(graph: Graph) -> list[_CachedAttention]:
    caches = Caches(graph)
    if not (caches.outliving or caches.by_storage):
        return []  # nothing outlives the program
    tracing = CacheTracer(graph, caches)
    attentions = [
        _CachedAttention(attention, key, value)
        for attention in graph.flow.shared(attentions_of)
        if (key := tracing.cache(attention.key)) and (value := tracing.cache(attention.value))
    ]
    has_growing_cache = any(f.key.grows and f.value.grows for f in attentions)
    return [f for f in attentions if _is_plausible(graph, f, has_growing_cache)]


def _is_plausible(graph: Graph, attention: _CachedAttention, certain: bool) -> bool:
    """Return True if the keys and values of an attention are probably a KV cache.

    Kind `read`: both must have it, an op must compute the queries, and another attention must have a growing cache
    (`certain`). Kind `kept`: the queries do not outlive the program, which has no backward pass. Other kinds: always.
    """
    kinds = {attention.key.kind, attention.value.kind}
    if "read" in kinds:
        return certain and kinds == {"read"} and graph.producer(origin(graph, attention.attention.query)) is not None
    if "kept" in kinds:
        if any("_backward" in operation for operation in graph.by_op):
            return False  # a backward pass needs keys and values of the forward pass
        return not set(chain(graph, attention.attention.query)) & set(graph.outputs)
    return True


def _match(found: _CachedAttention) -> PatternMatch:
    attention, key, value = found.attention, found.key, found.value
    decode = attention.queries == 1 and key.is_older_than_program
    return PatternMatch(
        pattern=KeyValueCache.name,
        nodes=tuple(sorted({*key.nodes, *value.nodes, *attention.nodes})),
        confidence=min(_CONFIDENCE[key.kind], _CONFIDENCE[value.kind]),
        reason=f"keys and values of the attention in node {attention.nodes[-1]} {_DESCRIPTIONS[key.kind]}; {_counts(attention)}",
        hints={"colocate": (found.values,)},
        residency=dict.fromkeys(found.values, DataResidency.STATEFUL_KV_CACHE),
        phase=ExecutionPhase.LLM_DECODE if decode else ExecutionPhase.LLM_PREFILL,
        details={"kind": key.kind, "queries": attention.queries, "keys": attention.keys},
    )


def _counts(attention: Attention) -> str:
    return f"{attention.queries} {'query' if attention.queries == 1 else 'queries'} over {attention.keys} keys"
