"""Current metrics of an executor, collected from counters of its parts when the gateway asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from djinn_core.wire.executor_reports import ExecutorMetrics, LabelledValue
from djinn_core.wire.messages import PRESSURE
from djinn_server.batching.session_batches import SessionBatches
from djinn_server.compiling.compilation_queue import CompilationQueue
from djinn_server.compiling.graph_recorder import GraphRecorder
from djinn_server.context import ExecutorContext
from djinn_server.memory.ledger import Ledger
from djinn_server.recovery.leases import Leases
from djinn_server.running.growing import copied_bytes
from djinn_server.usage_metrics import Holdings
from djinn_server.weights.store import WeightStore
from djinn_server.weights.weight_reader import WeightReader


def metered(context: ExecutorContext, store: WeightStore | None, leases: Leases, holdings: Holdings) -> ExecutorMetrics:
    """Return the metrics of an executor. `store`: weights of its tenant. `leases`: sessions and journals.

    `holdings`: memory of the sessions.
    """
    device = context.device
    sessions = context.usage.report(holdings)
    parts = [_queue(context), _recovery(leases), _read(context.weights), _appended()]
    if store is not None:
        parts.append(_stored(store))
    if device.compiling is not None:
        parts.append(_compiled(device.compiling))
    if device.graphs is not None:
        parts.append(_recorded(device.graphs))
    if device.batches is not None:
        parts.append(_batched(device.batches))
    if device.ledger is not None:
        parts.append(_memory(device.ledger))
    parts.append(sessions)  # which also has counters that are 0 without a session
    return ExecutorMetrics(
        _merged(part.counters for part in parts),
        _merged(part.gauges for part in parts),
        {name: values for part in parts for name, values in part.labelled.items()},
        sessions.distributions,
    )


def _merged(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    return {name: value for part in parts for name, value in part.items()}


def _queue(context: ExecutorContext) -> ExecutorMetrics:
    turns = context.device.turns
    return ExecutorMetrics(
        counters={"device_seconds": turns.device_seconds()},
        gauges={
            "waiting_sessions": turns.waiting,
            "longest_wait_seconds": turns.longest_wait,
            "disk_bytes": context.disk.used,
        },
    )


def _appended() -> ExecutorMetrics:
    appended, copied = copied_bytes()
    return ExecutorMetrics(counters={"appended_bytes": appended, "append_copied_bytes": copied})


def _recovery(leases: Leases) -> ExecutorMetrics:
    journals, nbytes = leases.journaled()
    return ExecutorMetrics(gauges={"journals": journals, "journal_bytes": nbytes})


def _read(weights: WeightReader) -> ExecutorMetrics:
    shared = weights.shared
    return ExecutorMetrics(
        counters={
            "weight_reads": weights.reads,
            "weight_read_bytes": weights.read_bytes,
            "shared_weight_hits": shared.hits,
            "shared_weight_hit_bytes": shared.hit_bytes,
        },
        gauges={"shared_weight_bytes": shared.nbytes()},
    )


def _stored(store: WeightStore) -> ExecutorMetrics:
    weights, nbytes = store.contents()
    counts = store.counts
    return ExecutorMetrics(
        counters={
            "store_hits": counts.hits,
            "store_hit_bytes": counts.hit_bytes,
            "store_misses": counts.misses,
            "store_evictions": counts.evictions,
        },
        gauges={"store_weights": weights, "store_bytes": nbytes, "store_limit_bytes": store.limit},
    )


def _compiled(compiling: CompilationQueue) -> ExecutorMetrics:
    counts = compiling.counts
    return ExecutorMetrics(
        counters={
            "compilations": counts.compilations,
            "compilation_failures": counts.failures,
            "compilation_seconds": counts.seconds,
            "compilations_unused": counts.unused,
            "compiled_runs": counts.runs,
        },
        gauges={**compiling.figures()},
    )


def _recorded(graphs: GraphRecorder) -> ExecutorMetrics:
    counts = graphs.counts
    return ExecutorMetrics(
        counters={"graph_captures": graphs.captures, "graphs_unused": counts.unused, "graph_runs": counts.runs},
        gauges={**graphs.figures()},
    )


def _batched(batches: SessionBatches) -> ExecutorMetrics:
    return ExecutorMetrics(counters=attrs.asdict(batches.counts), gauges={"batch_weight_bytes": batches.packed.nbytes})


def _memory(ledger: Ledger) -> ExecutorMetrics:
    counts = ledger.counts
    return ExecutorMetrics(
        counters={
            "evictions": counts.evictions,
            "spills": counts.spills,
            "spilled_bytes": counts.spilled,
            "restores": counts.restores,
            "restored_bytes": counts.restored,
            "dropped_weights": counts.dropped,
            "reread_bytes": counts.reread_bytes,
            "memory_refusals": counts.refused,
        },
        gauges={
            "memory_limit_bytes": 0 if ledger.on_demand else ledger.limit,
            "memory_reserve_bytes": ledger.process.reserve,
            "memory_pressure_level": ledger.pressure.level,
            "memory_peak_bytes": ledger.peak,
            "process_memory_peak_bytes": ledger.process.peak,
            "kv_cache_bytes": 0,
            "kv_cache_pinned_bytes": 0,
            "evicted_bytes": ledger.evicted,
            "memory_shared_bytes": ledger.shared_bytes(),
            "spill_bytes": ledger.spilled,
        },
        labelled={
            "memory_pressure_changes": tuple(
                LabelledValue((level,), entered)
                for level, entered in zip(PRESSURE, ledger.pressure.entered, strict=True)
            ),
        },
    )
