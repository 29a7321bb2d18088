"""Caches as people write them, growing and static, and values that attention reads and the program does not keep."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import djinn
import djinn_kv_cache
from djinn.planning import DataResidency, ExecutionPhase, fx_graph
from djinn.testing import PatternConformance, PluginConformance
from djinn_kv_cache import KeyValueCache

HEADS, WIDTH = 2, 4


def fused_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def parts(q, k, v):
    return torch.softmax(q @ k.mT / 2, -1) @ v


def project(x, w):
    """Return queries, keys and values of shape (1, heads, tokens, width) from x of (1, tokens, heads * width)."""
    projected = (x @ w).view(1, -1, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
    return projected[0], projected[1].clone(), projected[2].clone()


def first_step(mix):
    """Return a prefill step that appends keys and values to empty caches and returns them."""

    def run(x, w):
        q, k, v = project(x, w)
        k, v = (torch.cat([torch.empty(0), t], -2) for t in (k, v))
        return mix(q, k, v), k, v

    return run


def next_step(mix):
    """Return a decode step with a growing cache."""

    def run(x, w, keys, values):
        q, k, v = project(x, w)
        k, v = torch.cat([keys, k], -2), torch.cat([values, v], -2)
        return mix(q, k, v), k, v

    return run


def write_by_index_copy(buffer, new, position):
    return buffer.index_copy_(2, position, new)


def write_by_slice(buffer, new, position):
    del position
    buffer[:, :, 3 : 3 + new.shape[2]] = new
    return buffer


def write_by_index_put(buffer, new, position):
    buffer[:, :, position] = new
    return buffer


def write_by_scatter(buffer, new, position):
    return buffer.scatter_(2, position.view(1, 1, -1, 1).expand(new.shape), new)


def static_step(mix, write):
    """Return a decode step that writes into buffers of fixed length."""

    def run(x, w, keys, values, position):
        q, k, v = project(x, w)
        k, v = write(keys, k, position), write(values, v, position)
        return mix(q, k, v)

    return run


def functional_step(mix):
    """Return a decode step that returns new buffers instead of writing."""

    def run(x, w, keys, values, position):
        q, k, v = project(x, w)
        k, v = (torch.index_copy(b, 2, position, t) for b, t in ((keys, k), (values, v)))
        return mix(q, k, v), k, v

    return run


def trace_graph(function, *inputs):
    return fx_graph(make_fx(function, tracing_mode="fake")(*inputs))


def match_graph(graph):
    pattern = KeyValueCache()
    return list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))


def tokens(count):
    return torch.rand(1, count, HEADS * WIDTH), torch.rand(HEADS * WIDTH, 3 * HEADS * WIDTH)


def old_cache(length=5):
    return tuple(torch.rand(1, HEADS, length, WIDTH) for _ in range(2))


def static(mix, write, queries=1):
    return trace_graph(static_step(mix, write), *tokens(queries), *old_cache(8), torch.arange(3, 3 + queries))


def cache_details(match):
    return {name: match.details[name] for name in ("kind", "queries", "keys")}


def buffers(graph):
    """Return inputs of the shape of a static cache."""
    return {v for v in graph.inputs if graph.meta(v).shape == (1, HEADS, 8, WIDTH)}


MIXES = pytest.mark.parametrize("mix", [fused_attention, parts], ids=lambda m: m.__name__)
WRITES = pytest.mark.parametrize(
    "write", [write_by_index_copy, write_by_slice, write_by_index_put, write_by_scatter], ids=lambda w: w.__name__
)


@MIXES
def test_new_cache_is_prefill(mix):
    graph = trace_graph(first_step(mix), *tokens(6))
    (match,) = match_graph(graph)
    assert match.phase is ExecutionPhase.LLM_PREFILL
    assert cache_details(match) == {"kind": "created", "queries": 6, "keys": 6}
    assert set(match.residency) == set(graph.outputs[:2])  # the result of the attention is made last


@MIXES
@pytest.mark.parametrize(("queries", "phase"), [(1, ExecutionPhase.LLM_DECODE), (4, ExecutionPhase.LLM_PREFILL)])
def test_growing_cache_phase_by_query_count(mix, queries, phase):
    graph = trace_graph(next_step(mix), *tokens(queries), *old_cache())
    (match,) = match_graph(graph)
    assert match.phase is phase
    assert cache_details(match) == {"kind": "appended", "queries": queries, "keys": 5 + queries}
    assert set(match.residency) == {*graph.inputs[2:], *graph.outputs[:2]}
    assert set(match.residency.values()) == {DataResidency.STATEFUL_KV_CACHE}


@MIXES
@WRITES
def test_static_cache_matches_by_its_writes(mix, write):
    graph = static(mix, write)
    (match,) = match_graph(graph)
    assert match.phase is ExecutionPhase.LLM_DECODE
    assert cache_details(match) == {"kind": "written", "queries": 1, "keys": 8}
    assert {v for v in graph.inputs if v in match.residency} == buffers(graph)


@MIXES
def test_static_cache_without_in_place_writes_matches(mix):
    graph = trace_graph(functional_step(mix), *tokens(1), *old_cache(8), torch.arange(3, 4))
    (match,) = match_graph(graph)
    assert match.details["kind"] == "written"
    assert set(match.residency) == {*buffers(graph), *graph.outputs[:2]}


def test_sliding_window_cache_matches():
    def run(x, w, keys, values):
        q, k, v = project(x, w)
        k, v = torch.cat([keys, k], -2), torch.cat([values, v], -2)
        return fused_attention(q, k, v), k[:, :, 1:], v[:, :, 1:]

    (match,) = match_graph(trace_graph(run, *tokens(1), *old_cache()))
    assert match.details["kind"] == "appended"


def write_rolled(buffer, new, position):
    del position
    buffer.copy_(torch.cat([buffer.roll(-1, 2)[:, :, :-1], new], 2))
    return buffer


def write_ring(buffer, new, position):
    return buffer.index_copy_(2, position % buffer.shape[2], new)


@pytest.mark.parametrize("write", [write_rolled, write_ring], ids=lambda w: w.__name__)
def test_static_ring_buffer_cache_matches(write):
    (match,) = match_graph(static(fused_attention, write))
    assert match.details["kind"] == "written"


def quantize(t, scale):
    return (t / scale).round().clamp(-128, 127).to(torch.int8)


def test_growing_quantized_cache_matches():
    def run(x, w, keys, values, scale):
        q, k, v = project(x, w)
        k, v = (torch.cat([old_cache, quantize(new, scale)], -2) for old_cache, new in ((keys, k), (values, v)))
        return fused_attention(q, k.float() * scale, v.float() * scale), k, v

    few = [torch.ones(1, HEADS, 5, WIDTH, dtype=torch.int8) for _ in range(2)]
    graph = trace_graph(run, *tokens(1), *few, torch.ones(1))
    (match,) = match_graph(graph)
    assert match.phase is ExecutionPhase.LLM_DECODE
    few = {v for v in (*graph.inputs, *graph.outputs) if graph.meta(v).dtype is torch.int8}
    assert len(few) == 4
    scale = {v for v in graph.inputs if graph.meta(v).shape == (1,)}
    assert set(match.residency) == few | scale


def test_quantized_cache_with_full_precision_part_matches():
    def run(x, w, keys, values, far_keys, far_values, scale):
        q, k, v = project(x, w)
        whole = [torch.cat([far.float() * scale, near, new], -2)
                 for far, near, new in ((far_keys, keys, k), (far_values, values, v))]  # fmt: skip
        return fused_attention(q, *whole), torch.cat([keys, k], -2), torch.cat([values, v], -2)

    few = [torch.ones(1, HEADS, 9, WIDTH, dtype=torch.int8) for _ in range(2)]
    graph = trace_graph(run, *tokens(1), *old_cache(2), *few, torch.ones(1))
    (match,) = match_graph(graph)
    olds = {v for v in graph.inputs if len(graph.meta(v).shape) == 4}
    assert len(olds) == 4
    assert olds <= set(match.residency)


def test_quantized_copy_of_full_keys_is_new_cache():
    def run(x, w, scale):
        q, k, v = project(x, w)
        return fused_attention(q, k, v), quantize(k, scale), quantize(v, scale)

    (match,) = match_graph(trace_graph(run, *tokens(6), torch.ones(1)))
    assert match.details["kind"] == "created"
    assert match.phase is ExecutionPhase.LLM_PREFILL


@MIXES
@pytest.mark.parametrize("put", [False, True], ids=["cat", "pieces"])
def test_latent_attention_cache_matches(mix, put):
    """Latent attention caches one narrow row and a few rotated numbers per token."""

    def run(x, w, narrow, turned, down, up):
        q = (x @ w).view(1, -1, HEADS, WIDTH + 2).transpose(1, 2)
        row = F.layer_norm(x @ down, (3,))
        narrow, turned = torch.cat([narrow, row], 1), torch.cat([turned, x[..., :2]], 1)
        k, v = (narrow @ up).view(1, -1, HEADS, 2 * WIDTH).transpose(1, 2).split(WIDTH, -1)
        beside = turned[:, None].expand(-1, HEADS, -1, -1)
        if put:
            whole = k.new_empty(*k.shape[:-1], WIDTH + 2)
            whole[..., :WIDTH].copy_(k)
            whole[..., WIDTH:].copy_(beside)
        else:
            whole = torch.cat([k, beside], -1)
        return mix(q, whole, v), narrow, turned

    wide = HEADS * WIDTH
    shapes = (1, 1, wide), (wide, HEADS * (WIDTH + 2)), (1, 5, 3), (1, 5, 2), (wide, 3), (3, 2 * wide)
    graph = trace_graph(run, *(torch.rand(s) for s in shapes))
    (match,) = match_graph(graph)
    assert match.phase is ExecutionPhase.LLM_DECODE
    assert {graph.meta(v).shape for v in match.residency} == {(1, 5, 3), (1, 5, 2), (1, 6, 3), (1, 6, 2)}


def test_shared_keys_are_one_cache():
    def run(x, w, keys, values):
        q, k, v = project(x, w)
        k, v = torch.cat([keys, k], -2), torch.cat([values, v], -2)
        return fused_attention(fused_attention(q, k, v) * 2, k, v), k, v

    graph = trace_graph(run, *tokens(1), *old_cache())
    assert len(graph.by_op["_scaled_dot_product_flash_attention_for_cpu"]) == 2
    assert len(match_graph(graph)) == 1


def test_cache_links_successive_programs():
    """The cache is recognised by values that flow from one program into the next."""
    with djinn.capture() as first:
        x, w = tokens(3)
        mixed, keys, values = first_step(fused_attention)(x, w)
    with djinn.capture() as second:
        later = next_step(fused_attention)(x[:, :1], w, keys, values)
    before, after = (next(m for m in c.patterns if m.pattern == "kv_cache") for c in (first, second))
    left = {v for v in before.residency if v in first.graph.outputs}
    assert left
    assert left == {v for v in after.residency if v in second.graph.inputs}
    assert (before.phase, after.phase) == (ExecutionPhase.LLM_PREFILL, ExecutionPhase.LLM_DECODE)
    del mixed, later


@MIXES
@pytest.mark.parametrize(("length", "kind"), [(5, "appended"), (0, "created")])
def test_two_steps_in_one_program_share_cache(mix, length, kind):
    def run(x, w, *cache):
        first, *cache = next_step(mix)(x, w, *cache) if cache else first_step(mix)(x, w)
        second, *cache = next_step(mix)(first[:, 0, -1:].repeat(1, 1, HEADS), w, *cache)
        return second, *cache

    graph = trace_graph(run, *tokens(1), *(old_cache(length) if length else ()))
    (match,) = match_graph(graph)
    assert match.details["kind"] == kind
    assert set(graph.outputs) & set(match.residency) == set(graph.outputs) - {graph.outputs[-1]}
    assert match.phase is (ExecutionPhase.LLM_DECODE if length else ExecutionPhase.LLM_PREFILL)


def test_keys_in_two_parts_are_no_cache():
    def run(x, w):
        q, k, v = project(x, w)
        k, v = (torch.cat([torch.empty(0), torch.cat([t[..., :2], t[..., 2:].neg()], -1)], -2) for t in (k, v))
        return fused_attention(q, k, v), k, v

    graph = trace_graph(run, *tokens(6))
    (match,) = match_graph(graph)
    assert sum(graph.nodes[n].operation == "cat" for n in match.nodes) == 2


@MIXES
def test_cache_matches_through_repeated_heads(mix):
    def run(x, w, keys, values):
        q, k, v = project(x, w)
        k, v = torch.cat([keys, k], -2), torch.cat([values, v], -2)
        q = torch.cat([q, q], 1)
        wide = [t[:, :, None].expand(1, HEADS, 2, *t.shape[2:]).reshape(1, 2 * HEADS, *t.shape[2:]) for t in (k, v)]
        return mix(q, *wide), k, v

    (match,) = match_graph(trace_graph(run, *tokens(1), *old_cache()))
    assert match.phase is ExecutionPhase.LLM_DECODE


def test_cross_attention_cache_matches_beside_growing_cache():
    def run(x, w, keys, values, far_keys, far_values):
        q, k, v = project(x, w)
        k, v = torch.cat([keys, k], -2), torch.cat([values, v], -2)
        near = fused_attention(q, k, v)
        return fused_attention(near * 2, far_keys, far_values), k, v

    kinds = sorted(m.details["kind"] for m in match_graph(trace_graph(run, *tokens(1), *old_cache(), *old_cache(9))))
    assert kinds == ["appended", "read"]


def joint_attention(x, w, y):
    """Attend jointly over two kinds of tokens. The concatenated keys are not kept."""
    (q, k, v), (q2, k2, v2) = project(x, w), project(y, w)
    return fused_attention(torch.cat([q, q2], -2), torch.cat([k, k2], -2), torch.cat([v, v2], -2))


def encoder_attention(x, w):
    return parts(*project(x, w))


def prefix_attention(x, w, keys, values):
    """Prepend a learned prefix to the keys. The result is not kept."""
    q, k, v = project(x, w)
    return fused_attention(q, torch.cat([keys, k], -2), torch.cat([values, v], -2))


def return_projections(x, w):
    q, k, v = project(x, w)
    return fused_attention(q, k, v), q, k, v


def input_behind(q, k, v):
    return fused_attention(q, k, v)


OTHERS = {
    joint_attention: (*tokens(3), torch.rand(1, 2, HEADS * WIDTH)),
    encoder_attention: tokens(3),
    prefix_attention: (*tokens(3), *old_cache()),
    return_projections: tokens(3),
    input_behind: (torch.rand(1, 2, 3, 4),) * 3,
}


@pytest.mark.parametrize("other", OTHERS, ids=lambda o: o.__name__)
def test_temporary_keys_are_no_cache(other):
    assert not match_graph(trace_graph(other, *OTHERS[other]))


def test_softmax_of_a_vector_times_a_matrix_reads_no_cache(embedded):
    matrix, vector = torch.ones(3, 3, device=embedded), torch.ones(3, device=embedded)
    with djinn.capture() as captured:
        kept = torch.cat([matrix, matrix])
        out = torch.matmul(torch.softmax(torch.matmul(vector, matrix)[None], -1), matrix)
    assert kept.shape == (6, 3)
    assert out.shape == (1, 3)
    assert not match_graph(captured.graph)


def test_concatenation_with_out_tensor_is_no_cache(embedded):
    x, given = torch.ones(3, 3, device=embedded), torch.ones(6, 3, device=embedded)
    with djinn.capture() as captured:
        torch.cat([x, x], out=given)
        out = torch.softmax(given @ x, -1) @ x
    assert out.shape == (6, 3)
    assert not match_graph(captured.graph)


class TestKeyValueCache(PatternConformance):
    @pytest.fixture
    def pattern(self):
        return KeyValueCache()

    @pytest.fixture
    def recognised(self):
        growing = trace_graph(next_step(fused_attention), *tokens(1), *old_cache())
        return {"growing": growing, "static": static(parts, write_by_index_copy)}


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_kv_cache


def test_folded_heads_keep_query_count():
    def run(x, w, keys, values, position):
        q, k, v = project(x, w)
        k, v = write_by_index_copy(keys, k, position), write_by_index_copy(values, v, position)
        return fused_attention(torch.cat([q, q], 1).view(1, HEADS, 2, WIDTH), k, v)

    (match,) = match_graph(trace_graph(run, *tokens(1), *old_cache(8), torch.arange(3, 4)))
    assert match.phase is ExecutionPhase.LLM_DECODE
