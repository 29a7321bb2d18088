"""Decisions of each stage with their reasons, as JSON values. Times are in seconds, sizes in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.schedule import Step
from djinn_core.planning.units import size, work
from djinn_profiler.explain.outline import Part, outline
from djinn_profiler.explain.survey import MatchSummary, Survey

_MAX_SLOWEST = 5


def describe(result: PipelineResult, *, unfold: bool = False) -> dict[str, Any]:
    """Return the decisions of every stage that ran, and the tree of modules, as JSON values.

    `unfold`: True to list equal layers one by one.
    """
    parts = {
        "graph": _graph(result),
        "annotate": _profile(result),
        "estimate": _costs(result),
        "optimize": _plan(result),
        "place": _placement(result),
        "schedule": _schedule(result),
        "modules": modules(result, unfold=unfold),
    }
    description = {name: part for name, part in parts.items() if part is not None}
    return {**description, "seconds": dict(result.seconds)}


def modules(result: PipelineResult, *, unfold: bool = False) -> dict[str, Any]:
    """Return the tree of modules with the facts about each module."""
    whole = outline(result.graph, result.profile, unfold=unfold)
    survey = Survey(result, whole)
    return _module(whole, survey)


def _module(part: Part, survey: Survey) -> dict[str, Any]:
    facts = survey.facts(part)
    cost = (
        {"flops": facts.flops, "bytes_moved": facts.bytes_moved, "seconds": facts.seconds} if survey.has_costs else {}
    )
    return {
        "name": part.name,
        "path": part.path,
        "class": part.kind,
        "count": part.count,
        "calls": part.calls,
        "ops": facts.ops,
        "running": facts.remaining_ops,
        **cost,
        "phases": dict(facts.phases),
        "devices": dict(facts.devices),
        "operations": dict(facts.operations),
        "dearest": list(facts.slowest_ops),
        "bytes_by_residency": dict(facts.resident_bytes),
        "patterns": [_match(match) for match in facts.patterns],
        "parts": [_module(inner, survey) for inner in part.parts],
    }


def _match(match: MatchSummary) -> dict[str, Any]:
    return {
        "pattern": match.pattern,
        "count": match.count,
        "confidence": match.confidence,
        "reason": match.reason,
        "details": json_value(match.details),
        "decisions": [attrs.asdict(decision) for decision in match.decisions],
    }


def json_value(value: Any) -> Any:
    """Return a fact of a plugin, with nested mappings and sequences, as a JSON value."""
    if isinstance(value, Mapping):
        return {str(name): json_value(fact) for name, fact in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_value(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _graph(result: PipelineResult) -> dict[str, Any]:
    graph = result.graph
    return {
        "nodes": len(graph.nodes),
        "inputs": len(graph.inputs),
        "outputs": len(graph.outputs),
        "topology_hash": graph.topology_hash,
        "shape_hash": graph.shape_hash,
        "operations": counted(node.op for node in graph.nodes),
    }


def _profile(result: PipelineResult) -> dict[str, Any] | None:
    profile = result.profile
    if profile is None:
        return None
    sizes: Counter[str] = Counter()
    for value, residency in profile.residency.items():
        sizes[residency.value] += result.graph.meta(value).nbytes
    return {**profile_facts(profile), "bytes_by_residency": dict(sizes), "patterns": _matches(profile)}


def profile_facts(profile: WorkloadProfile) -> dict[str, Any]:
    """Return a summary of a profile for the whole program."""
    return {
        "workload": profile.workload.value,
        "reasons": list(profile.reasons),
        "phases": counted(p.value for p in profile.phases),
        "modalities": counted(m.value for m in profile.modalities),
        "residency": counted(r.value for r in profile.residency.values()),
        "roles": counted(profile.roles.values()),
    }


def _matches(profile: WorkloadProfile) -> list[dict[str, Any]]:
    return [
        {
            "pattern": match.pattern,
            "nodes": list(match.nodes),
            "confidence": match.confidence,
            "reason": match.reason,
            "phase": match.phase.value if match.phase else None,
            "details": json_value(match.details),
        }
        for match in profile.patterns
    ]


def _costs(result: PipelineResult) -> dict[str, Any] | None:
    if result.costs is None:
        return None
    devices = {
        device: {
            "seconds": sum(e.seconds for e in estimates),
            "bytes_read": sum(e.bytes_read for e in estimates),
            "bytes_written": sum(e.bytes_written for e in estimates),
            "models": counted(e.model or "none" for e in estimates),
            "calibrated": _calibrated(result, device),
            "speeds": speeds_of(result, device),
        }
        for device, estimates in result.costs.by_device.items()
    }
    return {"flops": result.costs.flops, "devices": devices, "dearest": _slowest(result)}


def speeds_of(result: PipelineResult, device: str) -> str:
    """Return a phrase about the speeds on which a device's predicted times are based."""
    if _calibrated(result, device):
        return "measured speeds"
    capabilities = next((d for d in result.topology.devices if d.id == device), None)
    rates = (
        f" of {work(capabilities.speeds[0])}/s and {size(capabilities.speeds[1])}/s" if capabilities is not None else ""
    )
    return f"assumed speeds{rates}: `djinn calibrate` measures them"


def _calibrated(result: PipelineResult, device: str) -> bool:
    return any(d.id == device and d.calibration is not None for d in result.topology.devices)


def _slowest(result: PipelineResult) -> list[dict[str, Any]]:
    """Return the slowest ops on the first device, with the summed seconds of each op's nodes."""
    estimates = next(iter(result.costs.by_device.values()), ()) if result.costs else ()
    seconds: dict[str, float] = {}
    for node, estimate in zip(result.graph.nodes, estimates, strict=False):
        seconds[node.op] = seconds.get(node.op, 0.0) + estimate.seconds
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:_MAX_SLOWEST]
    return [{"op": op, "seconds": total} for op, total in slowest]


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
                "measured": attrs.asdict(trials) if (trials := result.trial_times.get(r.optimization)) else None,
            }
            for r in result.plan.results
        ],
    }


def _placement(result: PipelineResult) -> dict[str, Any] | None:
    if result.placement is None:
        return None
    decisions = Counter((d.device, d.reason) for d in result.placement.decisions)
    repeated = Counter((r.device, r.reason) for r in result.placement.replicas)
    return {
        "policy": result.placement.policy,
        "refused": list(result.placement.rejections),
        "devices": list(result.placement.devices),
        "decisions": [{"device": d, "reason": r, "nodes": n} for (d, r), n in decisions.items()],
        "replicas": [{"device": d, "reason": r, "nodes": n} for (d, r), n in repeated.items()],
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
        "steps": {device: counted(map(_step_name, steps)) for device, steps in schedule.steps.items()},
    }


def _step_name(step: Step) -> str:
    return type(step).__name__.lower()


def counted(names: Iterable[str]) -> dict[str, int]:
    """Return the count of each name. The most frequent name comes first."""
    return dict(Counter(names).most_common())
