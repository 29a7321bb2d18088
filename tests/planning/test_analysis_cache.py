"""Plans found again: what counts as the same, what does not, and that a plan found again is right for its program."""

from __future__ import annotations

import gc
import threading
import time

import attrs
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from djinn.planning import fx_graph
from djinn.testing import ProgramBuilder, random_graph, random_inputs, replay, replay_schedule, topology
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import make_handle, new_storage, storage_of, view_of
from djinn_core.ir.program import Program
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import Request
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import Registry, load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import PluginSetting
from djinn_profiler.plans.analysis_cache import AnalysisCache
from djinn_profiler.plans.cached_plans import planned

PLUGINS = ("attention", "kv_cache", "cleanup")


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry(
        Selection(plugins=PLUGINS, plugin_settings=(PluginSetting("cleanup", "on", "yes", "argument"),)),
        builtins=builtin_plugins(),
    )


def renumbered(program: Program) -> Program:
    """Return the program with new value ids, as the next step of a loop records it."""
    storages: dict[int, int] = {}
    names = {v: make_handle(storages.setdefault(storage_of(v), new_storage()), view_of(v)) for v in program.operands}
    operands = tuple(names[v] for v in program.operands)
    return attrs.evolve(program, operands=operands, dead=frozenset(names[v] for v in program.dead))


@pytest.mark.parametrize("seed", range(30))
def test_cached_plan_fits_new_program(seed, registry):
    cache, request = AnalysisCache(), Request(topology(2))
    first = random_graph(seed, length=30)
    planned(first.program, registry, request, cache)
    result = planned(renumbered(first.program), registry, request, cache)
    assert cache.statistics()["plan_hits"] == 1
    graph = result.graph
    assert set(graph.inputs).isdisjoint(first.inputs)
    fresh = plan(graph.program, registry, request)
    assert result.placement == fresh.placement
    assert result.plan == fresh.plan
    assert (result.schedule.steps, result.schedule.replace) == (fresh.schedule.steps, fresh.schedule.replace)
    inputs = random_inputs(graph)
    expected = replay(graph, inputs)
    (held,), _ = replay_schedule(graph, result.schedule, inputs, {})[0].values(), None
    for value in graph.outputs:
        torch.testing.assert_close(held[value], expected[value], rtol=0, atol=0, equal_nan=True)


def decode(keys):
    """Return one decode step of a tiny attention with a growing cache."""

    def run(x, w, old_keys, old_values):
        q, k, v = (x @ w).view(1, 1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        k, v = torch.cat([old_keys, k], -2), torch.cat([old_values, v], -2)
        return torch.softmax(q @ k.mT, -1) @ v, k, v

    old = torch.rand(1, 2, keys, 4)
    return fx_graph(make_fx(run, tracing_mode="fake")(torch.rand(1, 1, 8), torch.rand(8, 24), old, old.clone()))


def build(length, dim=8, slot=2.0, shared=False, held=False):
    """Return a program that multiplies a growing value by a weight and a number."""
    builder = ProgramBuilder()
    x, w = builder.input(1, 2, length, dim), builder.input(dim, dim)
    other = builder.view("aten::alias", x, shape=(1, 2, length, dim)) if shared else x
    y = builder.op("aten::matmul", other, w, shape=(1, 2, length, dim))
    builder.op("aten::mul.Scalar", y, shape=(1, 2, length, dim), slots=(slot,))
    if not held:
        builder.drop(y)
    return share_signatures(builder.program())


def share_signatures(program: Program) -> Program:
    """Return the program with shared signatures for calls that differ only in sizes, as recorded programs have."""
    shared = (SIGNATURES.setdefault((c.op, len(c.operands)), c.signature) for c in program.calls)
    calls = tuple(attrs.evolve(c, signature=s) for c, s in zip(program.calls, shared, strict=True))
    return attrs.evolve(program, calls=calls)


SIGNATURES: dict = {}


def test_plan_key_includes_devices_residence_plugins_and_choices(registry):
    cache, program = AnalysisCache(), build(length=10)
    base = Request(topology(2))
    (x, *_), (one, two) = program.operands, (d.id for d in base.topology.devices)
    full = attrs.evolve(
        base.topology, devices=tuple(attrs.evolve(d, memory_free=d.memory_free // 2) for d in base.topology.devices)
    )
    planned(program, registry, base, cache)
    same = [attrs.evolve(base, topology=full)]
    others = [
        attrs.evolve(base, resident={x: one}),
        attrs.evolve(base, resident={x: two}),
        attrs.evolve(base, topology=topology(1)),
        attrs.evolve(base, fetch=(program.operands[-1],)),
        attrs.evolve(base, until="place"),
    ]
    for request in (*same, *others):
        planned(program, registry, request, cache)
    planned(program, registry.evolve(patterns=()), base, cache)
    counts = cache.statistics()
    assert (counts["plan_hits"], counts["plan_misses"]) == (1, 7)


def test_least_recently_used_plan_is_evicted(registry):
    cache, request = AnalysisCache(capacity=2), Request(topology())
    programs = [build(length=n) for n in (10, 200, 4000)]
    for index in (0, 1, 0, 2, 0, 1):
        planned(programs[index], registry, request, cache)
    counts = cache.statistics()
    assert counts["plan_entries"] == 2
    assert (counts["plan_hits"], counts["plan_misses"]) == (2, 4)


def test_threads_share_analysis_cache(registry):
    cache, request, failures = AnalysisCache(capacity=4), Request(topology()), []
    programs = [random_graph(seed).program for seed in range(8)]

    def work(offset):
        try:
            for i in range(24):
                result = planned(renumbered(programs[(i + offset) % 8]), registry, request, cache)
                assert result.schedule.program is result.graph.program
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert cache.statistics()["plan_entries"] == 4


@pytest.fixture
def without_garbage_collection():
    """Disable garbage collection, whose duration depends on objects of earlier tests."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_cache_hit_costs_less_than_planning(registry, without_garbage_collection):
    graph = random_graph(3, length=1500)
    cache, request = AnalysisCache(), Request(topology())

    def seconds(program):
        start = time.process_time()
        planned(program, registry, request, cache)
        return time.process_time() - start

    made = seconds(graph.program)
    found = min(seconds(renumbered(graph.program)) for _ in range(5))
    assert found < made / 2.5


def test_cached_decode_plan_keeps_semantics(registry):
    graph = decode(5)
    cache, request = AnalysisCache(), Request(topology())
    planned(graph, registry, request, cache)
    program = renumbered(graph.program)
    result = planned(Graph(program, graph.modules), registry, request, cache)
    (match,) = (m for m in result.profile.patterns if m.pattern == "kv_cache")
    assert set(match.residency) <= set(program.operands)
    (together, *_) = result.plan.hints["colocate"]
    assert set(together) <= set(program.operands)
    assert match.details["queries"] == 1
    assert result.seconds == {}
