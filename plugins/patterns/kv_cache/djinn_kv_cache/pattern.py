"""The pattern: candidates in, matches out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.dataflow import FUSED_ATTENTION, SOFTMAX, chain, origin
from djinn.hooks import DataResidency, ExecutionPhase, Graph, Node, PatternMatch
from djinn_kv_cache.caches import Cache, Kind, Surroundings
from djinn_kv_cache.reads import Read, reads

# How sure each kind is: a value that is merely held after attention read it may be held for another reason.
_CONFIDENCE: dict[Kind, float] = {"appended": 0.98, "written": 0.98, "created": 0.95, "kept": 0.75, "read": 0.7}
_TOLD = {
    "appended": "are appended to a cache from before, which attention reads",
    "written": "are written into a buffer from before, which attention reads",
    "created": "are put into a new cache, which outlives the program",
    "kept": "are read by attention and held after the program, while the queries are not",
    "read": "come from outside, beside attentions with caches",
}


class KeyValueCache:
    """KV caches, growing and static, for fused and unfused attention."""

    name = "kv_cache"
    tolerates_growth = True
    operations = FUSED_ATTENTION | SOFTMAX

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each attention whose keys and values are a cache."""
        surroundings = Surroundings(graph)
        found = [
            (read, key, value)
            for read in reads(graph, list(candidates))
            if (key := surroundings.cache(read.key)) and (value := surroundings.cache(read.value))
        ]
        certain = any(_grows(key) and _grows(value) for _, key, value in found)
        for read, key, value in found:
            if _plausible(graph, read, key, value, certain):
                yield _match(read, key, value)


def _grows(cache: Cache) -> bool:
    return cache.kind in {"appended", "written", "created"}


def _plausible(graph: Graph, read: Read, key: Cache, value: Cache, certain: bool) -> bool:
    """Keys that are only read count beside real caches; keys that are only held, where the queries are not."""
    kinds = {key.kind, value.kind}
    if "read" in kinds:
        return certain and kinds == {"read"} and graph.producer(origin(graph, read.query)) is not None
    if "kept" in kinds:
        return not set(chain(graph, read.query)) & set(graph.outputs)
    return True


def _match(read: Read, key: Cache, value: Cache) -> PatternMatch:
    decode = read.queries == 1 and key.from_before
    values = tuple(dict.fromkeys((*key.values, *value.values)))
    return PatternMatch(
        pattern=KeyValueCache.name,
        nodes=tuple(sorted({*key.nodes, *value.nodes, *read.nodes})),
        confidence=min(_CONFIDENCE[key.kind], _CONFIDENCE[value.kind]),
        reason=f"keys and values of the attention in node {read.nodes[-1]} {_TOLD[key.kind]}; {_counts(read)}",
        hints={"colocate": (values,)},
        residency=dict.fromkeys(values, DataResidency.STATEFUL_KV_CACHE),
        phase=ExecutionPhase.LLM_DECODE if decode else ExecutionPhase.LLM_PREFILL,
        details={"kind": key.kind, "queries": read.queries, "keys": read.keys},
    )


def _counts(read: Read) -> str:
    return f"{read.queries} {'query' if read.queries == 1 else 'queries'} over {read.keys} keys"
