"""Caches as people write them, growing and static, and values that attention reads but nobody keeps."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import djinn_kv_cache
from djinn.fx import fx_graph
from djinn.hooks import DataResidency, ExecutionPhase
from djinn.testing import PatternConformance, PluginConformance
from djinn_kv_cache import KeyValueCache

HEADS, WIDTH = 2, 4


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def parts(q, k, v):
    return torch.softmax(q @ k.mT / 2, -1) @ v


def project(x, w):
    """Queries, keys and values of shape (1, heads, tokens, width) from x of (1, tokens, heads * width)."""
    projected = (x @ w).view(1, -1, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
    return projected[0], projected[1].clone(), projected[2].clone()


def first_step(mix):
    """Prefill: the keys and values are put together with nothing, as caches begin, and returned."""

    def run(x, w):
        q, k, v = project(x, w)
        k, v = (torch.cat([torch.empty(0), t], -2) for t in (k, v))
        return mix(q, k, v), k, v

    return run


def next_step(mix):
    """Decode with a growing cache."""

    def run(x, w, keys, values):
        q, k, v = project(x, w)
        k, v = torch.cat([keys, k], -2), torch.cat([values, v], -2)
        return mix(q, k, v), k, v

    return run


def by_index_copy(buffer, new, position):
    return buffer.index_copy_(2, position, new)


def by_slice(buffer, new, position):
    del position
    buffer[:, :, 3 : 3 + new.shape[2]] = new
    return buffer


def by_index_put(buffer, new, position):
    buffer[:, :, position] = new
    return buffer


def static_step(mix, write):
    """A step with buffers of fixed length, which the program writes into."""

    def run(x, w, keys, values, position):
        q, k, v = project(x, w)
        k, v = write(keys, k, position), write(values, v, position)
        return mix(q, k, v)

    return run


def functional_step(mix):
    """The same without writing: the new buffers are results."""

    def run(x, w, keys, values, position):
        q, k, v = project(x, w)
        k, v = (torch.index_copy(b, 2, position, t) for b, t in ((keys, k), (values, v)))
        return mix(q, k, v), k, v

    return run


def traced(function, *inputs):
    return fx_graph(make_fx(function, tracing_mode="fake")(*inputs))


def matches(graph):
    pattern = KeyValueCache()
    return list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))


def tokens(count):
    return torch.rand(1, count, HEADS * WIDTH), torch.rand(HEADS * WIDTH, 3 * HEADS * WIDTH)


def old(length=5):
    return tuple(torch.rand(1, HEADS, length, WIDTH) for _ in range(2))


def static(mix, write, queries=1):
    return traced(static_step(mix, write), *tokens(queries), *old(8), torch.arange(3, 3 + queries))


def buffers(graph):
    """The inputs of the shape of a static cache."""
    return {v for v in graph.inputs if graph.meta(v).shape == (1, HEADS, 8, WIDTH)}


MIXES = pytest.mark.parametrize("mix", [fused, parts], ids=lambda m: m.__name__)
WRITES = pytest.mark.parametrize("write", [by_index_copy, by_slice, by_index_put], ids=lambda w: w.__name__)


@MIXES
def test_a_new_cache_is_prefill(mix):
    graph = traced(first_step(mix), *tokens(6))
    (match,) = matches(graph)
    assert match.phase is ExecutionPhase.LLM_PREFILL
    assert match.details == {"kind": "created", "queries": 6, "keys": 6}
    assert set(match.residency) == set(graph.outputs[:2])  # the result of the attention is made last


@MIXES
@pytest.mark.parametrize(("queries", "phase"), [(1, ExecutionPhase.LLM_DECODE), (4, ExecutionPhase.LLM_PREFILL)])
def test_a_growing_cache_is_decode_with_one_query_and_prefill_with_many(mix, queries, phase):
    graph = traced(next_step(mix), *tokens(queries), *old())
    (match,) = matches(graph)
    assert match.phase is phase
    assert match.details == {"kind": "appended", "queries": queries, "keys": 5 + queries}
    assert set(match.residency) == {*graph.inputs[2:], *graph.outputs[:2]}
    assert set(match.residency.values()) == {DataResidency.STATEFUL_KV_CACHE}


@MIXES
@WRITES
def test_a_static_cache_is_found_by_its_writes(mix, write):
    graph = static(mix, write)
    (match,) = matches(graph)
    assert match.phase is ExecutionPhase.LLM_DECODE
    assert match.details == {"kind": "written", "queries": 1, "keys": 8}
    assert {v for v in graph.inputs if v in match.residency} == buffers(graph)


@MIXES
def test_a_static_cache_without_writes_in_place(mix):
    graph = traced(functional_step(mix), *tokens(1), *old(8), torch.arange(3, 4))
    (match,) = matches(graph)
    assert match.details["kind"] == "written"
    assert set(match.residency) == {*buffers(graph), *graph.outputs[:2]}


def test_a_sliding_window_keeps_a_part_of_what_attention_read():
    def run(x, w, keys, values):
        q, k, v = project(x, w)
        k, v = torch.cat([keys, k], -2), torch.cat([values, v], -2)
        return fused(q, k, v), k[:, :, 1:], v[:, :, 1:]

    (match,) = matches(traced(run, *tokens(1), *old()))
    assert match.details["kind"] == "appended"


@MIXES
def test_caches_are_seen_through_repeated_heads(mix):
    def run(x, w, keys, values):
        q, k, v = project(x, w)
        k, v = torch.cat([keys, k], -2), torch.cat([values, v], -2)
        q = torch.cat([q, q], 1)
        wide = [t[:, :, None].expand(1, HEADS, 2, *t.shape[2:]).reshape(1, 2 * HEADS, *t.shape[2:]) for t in (k, v)]
        return mix(q, *wide), k, v

    (match,) = matches(traced(run, *tokens(1), *old()))
    assert match.phase is ExecutionPhase.LLM_DECODE


def test_cross_attention_reads_its_cache_beside_one_that_grows():
    def run(x, w, keys, values, far_keys, far_values):
        q, k, v = project(x, w)
        k, v = torch.cat([keys, k], -2), torch.cat([values, v], -2)
        near = fused(q, k, v)
        return fused(near * 2, far_keys, far_values), k, v

    kinds = sorted(m.details["kind"] for m in matches(traced(run, *tokens(1), *old(), *old(9))))
    assert kinds == ["appended", "read"]


def joint(x, w, y):
    """Two kinds of tokens in one attention: put together, but not kept."""
    (q, k, v), (q2, k2, v2) = project(x, w), project(y, w)
    return fused(torch.cat([q, q2], -2), torch.cat([k, k2], -2), torch.cat([v, v2], -2))


def encoder(x, w):
    return parts(*project(x, w))


def prefix(x, w, keys, values):
    """A learnt prefix: put before the keys, but the result is not kept."""
    q, k, v = project(x, w)
    return fused(q, torch.cat([keys, k], -2), torch.cat([values, v], -2))


def everything_held(x, w):
    q, k, v = project(x, w)
    return fused(q, k, v), q, k, v


def from_outside(q, k, v):
    return fused(q, k, v)


OTHERS = {
    joint: (*tokens(3), torch.rand(1, 2, HEADS * WIDTH)),
    encoder: tokens(3),
    prefix: (*tokens(3), *old()),
    everything_held: tokens(3),
    from_outside: (torch.rand(1, 2, 3, 4),) * 3,
}


@pytest.mark.parametrize("other", OTHERS, ids=lambda o: o.__name__)
def test_what_is_not_kept_for_the_next_step_is_no_cache(other):
    assert not matches(traced(other, *OTHERS[other]))


class TestKeyValueCache(PatternConformance):
    @pytest.fixture
    def pattern(self):
        return KeyValueCache()

    @pytest.fixture
    def recognised(self):
        growing = traced(next_step(fused), *tokens(1), *old())
        return {"growing": growing, "static": static(parts, by_index_copy)}


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_kv_cache


def test_one_query_is_one_query_also_where_heads_were_folded_into_queries():
    def run(x, w, keys, values, position):
        q, k, v = project(x, w)
        k, v = by_index_copy(keys, k, position), by_index_copy(values, v, position)
        return fused(torch.cat([q, q], 1).view(1, HEADS, 2, WIDTH), k, v)

    (match,) = matches(traced(run, *tokens(1), *old(8), torch.arange(3, 4)))
    assert match.phase is ExecutionPhase.LLM_DECODE
