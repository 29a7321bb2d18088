"""Current metrics of an executor, collected from its parts when the gateway asks."""

from __future__ import annotations

import attrs

from djinn_core.wire.executor_reports import ExecutorMetrics, LabelledValue
from djinn_core.wire.messages import PRESSURE
from djinn_server.context import ExecutorContext
from djinn_server.memory.ledger import Ledger
from djinn_server.recovery.leases import Leases
from djinn_server.running.growing import copied_bytes
from djinn_server.usage_metrics import Holdings
from djinn_server.weights.store import WeightStore
from djinn_server.weights.weight_reader import WeightReader

Values = dict[str, float]


def collect_metrics(
    context: ExecutorContext, store: WeightStore | None, leases: Leases, holdings: Holdings
) -> ExecutorMetrics:
    """Return the current metrics of an executor.

    Args:
        context: state of the executor.
        store: weight store of the tenant, if any.
        leases: sessions that clients may resume, with their journals.
        holdings: number and bytes of the sessions' values.
    """
    device = context.device
    sessions = context.usage.report(holdings)
    values = (
        _queue(context) | _appended() | _recovery(leases) | _reader_values(context.weights) | device.arbiter.figures()
    )
    labelled = dict(sessions.labelled)
    if store is not None:
        values |= _store_values(store)
    if device.ledger is not None:
        values |= _memory(device.ledger)
        entered = zip(PRESSURE, device.ledger.pressure.entry_counts, strict=True)
        labelled["memory_pressure_changes"] = tuple(LabelledValue((level,), times) for level, times in entered)
    # The sessions' values replace zeros above, such as `kv_cache_bytes`.
    return ExecutorMetrics(values | sessions.values, labelled, sessions.distributions)


def _queue(context: ExecutorContext) -> Values:
    turns = context.device.turns
    return {
        "device_seconds": turns.device_seconds(),
        "waiting_sessions": turns.waiting,
        "longest_wait_seconds": turns.longest_wait,
        "disk_bytes": context.disk.used,
    }


def _appended() -> Values:
    return dict(zip(("appended_bytes", "append_copied_bytes"), copied_bytes(), strict=True))


def _recovery(leases: Leases) -> Values:
    return dict(zip(("journals", "journal_bytes"), leases.journaled(), strict=True))


def _reader_values(weights: WeightReader) -> Values:
    shared_weights = weights.shared
    return {
        "weight_reads": weights.reads,
        "weight_read_bytes": weights.read_bytes,
        "shared_weight_hits": shared_weights.hits,
        "shared_weight_hit_bytes": shared_weights.hit_bytes,
        "shared_weight_bytes": shared_weights.nbytes(),
    }


def _store_values(store: WeightStore) -> Values:
    counts, contents = attrs.asdict(store.counts), zip(("weights", "bytes"), store.contents(), strict=True)
    return {f"store_{name}": value for name, value in {**counts, **dict(contents), "limit_bytes": store.limit}.items()}


def _memory(ledger: Ledger) -> Values:
    counts = ledger.counts
    return {
        "evictions": counts.evictions,
        "spills": counts.spills,
        "spilled_bytes": counts.spilled,
        "restores": counts.restores,
        "restored_bytes": counts.restored,
        "dropped_weights": counts.dropped,
        "reread_bytes": counts.reread_bytes,
        "memory_refusals": counts.refused,
        "memory_limit_bytes": 0 if ledger.on_demand else ledger.limit,
        "memory_reserve_bytes": ledger.process.reserve,
        "memory_pressure_level": ledger.pressure.level,
        "memory_peak_bytes": ledger.peak,
        "process_memory_peak_bytes": ledger.process.peak,
        "kv_cache_bytes": 0,
        "kv_cache_pinned_bytes": 0,
        "evicted_bytes": ledger.evicted_bytes,
        "memory_shared_bytes": ledger.shared_bytes(),
        "spill_bytes": ledger.spilled,
    }
