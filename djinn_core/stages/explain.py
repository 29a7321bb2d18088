"""What each stage decided and why, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from djinn_core.ir.profile import PatternMatch
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.schedule import Step

_SHOWN = 12  # lines of one kind before the rest is summed up


def describe(result: PipelineResult) -> dict[str, Any]:
    """The decisions of every stage that ran, as values that JSON can hold. Times in seconds, sizes in bytes."""
    parts = {
        "graph": _graph(result),
        "annotate": _profile(result),
        "estimate": _costs(result),
        "optimize": _plan(result),
        "place": _placement(result),
        "schedule": _schedule(result),
    }
    described = {name: part for name, part in parts.items() if part is not None}
    return {**described, "seconds": dict(result.seconds)}


def explain(result: PipelineResult) -> str:
    """The decisions of every stage that ran, as text: a heading for each stage, one line for each decision."""
    described = describe(result)
    lines: list[str] = []
    for stage, tell in _TELLERS.items():
        if stage in described:
            seconds = described["seconds"].get(stage)
            lines.append(f"{stage}{f'  ({seconds * 1e3:.1f} ms)' if seconds else ''}")
            lines += [f"  {line}" for line in tell(described[stage])]
    return "\n".join(lines)


def _graph(result: PipelineResult) -> dict[str, Any]:
    graph = result.graph
    return {
        "nodes": len(graph.nodes),
        "inputs": len(graph.inputs),
        "outputs": len(graph.outputs),
        "topology_hash": graph.topology_hash,
        "shape_hash": graph.shape_hash,
        "operations": dict(Counter(node.op for node in graph.nodes).most_common()),
    }


def _profile(result: PipelineResult) -> dict[str, Any] | None:
    profile = result.profile
    if profile is None:
        return None
    return {
        "workload": profile.workload.value,
        "reasons": list(profile.reasons),
        "phases": _counted(p.value for p in profile.phases),
        "modalities": _counted(m.value for m in profile.modalities),
        "residency": _counted(r.value for r in profile.residency.values()),
        "bytes_by_residency": _residency_bytes(result),
        "roles": _counted(profile.roles.values()),
        "patterns": [_match(m) for m in profile.patterns],
    }


def _residency_bytes(result: PipelineResult) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for value, residency in (result.profile.residency if result.profile else {}).items():
        sizes[residency.value] += result.graph.meta(value).nbytes
    return dict(sizes)


def _match(match: PatternMatch) -> dict[str, Any]:
    return {
        "pattern": match.pattern,
        "nodes": list(match.nodes),
        "confidence": match.confidence,
        "reason": match.reason,
        "phase": match.phase.value if match.phase else None,
        "details": dict(match.details),
    }


def _costs(result: PipelineResult) -> dict[str, Any] | None:
    if result.costs is None:
        return None
    devices = {
        device: {
            "seconds": sum(e.seconds for e in estimates),
            "bytes_read": sum(e.bytes_read for e in estimates),
            "bytes_written": sum(e.bytes_written for e in estimates),
            "models": _counted(e.model or "none" for e in estimates),
        }
        for device, estimates in result.costs.by_device.items()
    }
    return {"flops": result.costs.flops, "devices": devices, "dearest": _dearest(result)}


def _dearest(result: PipelineResult) -> list[dict[str, Any]]:
    """The ops that take longest on the first device, summed by op."""
    estimates = next(iter(result.costs.by_device.values()), ()) if result.costs else ()
    seconds: Counter[str] = Counter()
    for node, estimate in zip(result.graph.nodes, estimates, strict=False):
        seconds[node.op] += estimate.seconds  # type: ignore[assignment] # a Counter adds up floats as well
    return [{"op": op, "seconds": float(s)} for op, s in seconds.most_common(5)]


def _plan(result: PipelineResult) -> dict[str, Any] | None:
    if result.plan is None:
        return None
    return {
        "nodes": len(result.plan.nodes),
        "nodes_before": len(result.graph.nodes),
        "hints": {name: len(facts) for name, facts in result.plan.hints.items()},
        "equal_slots": len(result.plan.equal_slots),
        "optimizations": [
            {
                "optimization": r.optimization,
                "applied": r.applied,
                "reason": r.reason,
                "dropped": len(r.rewrite.drop),
                "seconds_before": r.seconds_before,
                "seconds_after": r.seconds_after,
            }
            for r in result.plan.results
        ],
    }


def _placement(result: PipelineResult) -> dict[str, Any] | None:
    if result.placement is None:
        return None
    decided = Counter((d.device, d.reason) for d in result.placement.decisions)
    return {
        "policy": result.placement.policy,
        "devices": list(result.placement.devices),
        "decisions": [{"device": d, "reason": r, "nodes": n} for (d, r), n in decided.items()],
    }


def _schedule(result: PipelineResult) -> dict[str, Any] | None:
    schedule = result.schedule
    if schedule is None:
        return None
    return {
        "scheduler": schedule.scheduler,
        "reasons": list(schedule.reasons),
        "stages": len({g.stage for g in schedule.groups}),
        "groups": [
            {"stage": g.stage, "device": g.device, "nodes": len(g.nodes), "strategy": g.strategy.value}
            for g in schedule.groups
        ],
        "steps": {device: _counted(map(_step_name, steps)) for device, steps in schedule.steps.items()},
    }


def _step_name(step: Step) -> str:
    return type(step).__name__.lower()


def _counted(names: Any) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _listed(counts: dict[str, int]) -> str:
    shown = [f"{name} {count:,}" for name, count in list(counts.items())[:_SHOWN]]
    rest = sum(list(counts.values())[_SHOWN:])
    return ", ".join([*shown, f"others {rest:,}"] if rest else shown) or "none"


def _tell_graph(part: dict[str, Any]) -> Iterator[str]:
    yield f"{part['nodes']:,} nodes, {part['inputs']:,} inputs, {part['outputs']:,} outputs"
    yield f"topology {part['topology_hash']}, shapes {part['shape_hash']}"
    yield f"ops: {_listed(part['operations'])}"


def _tell_profile(part: dict[str, Any]) -> Iterator[str]:
    yield f"workload {part['workload']}: {'; '.join(part['reasons'])}"
    yield f"phases: {_listed(part['phases'])}"
    yield f"modalities: {_listed(part['modalities'])}"
    sizes = part["bytes_by_residency"]
    yield "values: " + (", ".join(f"{n} {k} ({sizes[k]:,} B)" for k, n in part["residency"].items()) or "none")
    for match in part["patterns"][:_SHOWN]:
        facts = ", ".join(f"{name} {fact}" for name, fact in match["details"].items() if fact is not None)
        yield f"{match['pattern']} ({match['confidence']:.2f}): {match['reason']}; {facts}"
    if len(part["patterns"]) > _SHOWN:
        yield f"and {len(part['patterns']) - _SHOWN} more matches"


def _tell_costs(part: dict[str, Any]) -> Iterator[str]:
    yield f"{part['flops']:,.0f} floating-point operations"
    for device, cost in part["devices"].items():
        moved = cost["bytes_read"] + cost["bytes_written"]
        yield f"{device}: {cost['seconds'] * 1e3:.3f} ms, {moved:,} B moved, by {_listed(cost['models'])}"
    if part["dearest"]:
        yield "dearest: " + ", ".join(f"{d['op']} {d['seconds'] * 1e3:.3f} ms" for d in part["dearest"])


def _tell_plan(part: dict[str, Any]) -> Iterator[str]:
    yield f"{part['nodes']:,} of {part['nodes_before']:,} nodes run"
    for r in part["optimizations"]:
        saved = f", {r['seconds_before'] * 1e3:.3f} to {r['seconds_after'] * 1e3:.3f} ms" if r["applied"] else ""
        yield f"{r['optimization']} {'applied' if r['applied'] else 'not applied'}: {r['reason']}{saved}"
    if part["hints"]:
        yield f"hints: {_listed(part['hints'])}"


def _tell_placement(part: dict[str, Any]) -> Iterator[str]:
    yield f"policy {part['policy']}"
    for decision in part["decisions"][:_SHOWN]:
        yield f"{decision['nodes']:,} nodes on {decision['device']}: {decision['reason']}"


def _tell_schedule(part: dict[str, Any]) -> Iterator[str]:
    yield f"scheduler {part['scheduler']}: {'; '.join(part['reasons'])}"
    for group in part["groups"][:_SHOWN]:
        yield f"stage {group['stage']}: {group['nodes']:,} nodes on {group['device']}, {group['strategy']}"
    if len(part["groups"]) > _SHOWN:
        yield f"and {len(part['groups']) - _SHOWN} more groups"
    for device, steps in part["steps"].items():
        yield f"{device}: {_listed(steps)}"


_TELLERS = {
    "graph": _tell_graph,
    "annotate": _tell_profile,
    "estimate": _tell_costs,
    "optimize": _tell_plan,
    "place": _tell_placement,
    "schedule": _tell_schedule,
}
