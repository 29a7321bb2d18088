"""Notebook display of profiles, plans, placements and schedules: small HTML tables. Everything in them is escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import singledispatch

from djinn.planning import Costs, ExecutionSchedule, OptimizationPlan, PipelineResult, Placement, WorkloadProfile
from djinn_core.planning.explain.described import counted, profile_facts
from djinn_core.planning.explain.text import explain, listed
from djinn_core.planning.explain.units import duration, size, work
from djinn_observability.html.markup import text

_SHOWN = 20  # rows of one kind


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as HTML, with a title; rows beyond the first ones are counted."""
    every = list(rows)
    cells = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in every[:_SHOWN])
    more = f"<div>and {len(every) - _SHOWN} more</div>" if len(every) > _SHOWN else ""
    head = "".join(f"<th>{text(name)}</th>" for name in heads)
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>" if every else ""
    return f"<div><b>{text(title)}</b>{body}{more}</div>"


@singledispatch
def table_of(shown: object) -> str | None:
    """A value as HTML; None if it has no table."""
    del shown
    return None


@table_of.register
def _(shown: WorkloadProfile) -> str:
    facts = profile_facts(shown)
    rows = [
        ("because", "; ".join(facts["reasons"])),
        *((name, listed(facts[name])) for name in ("phases", "modalities", "residency", "roles")),
        ("patterns", listed(counted(match.pattern for match in shown.patterns))),
    ]
    return table(f"workload {facts['workload']}", ("", ""), rows)


@table_of.register
def _(shown: Costs) -> str:
    rows = [
        (
            device,
            work(sum(e.flops for e in estimates)),
            size(sum(e.bytes_read + e.bytes_written for e in estimates)),
            duration(sum(e.seconds for e in estimates)),
            listed(counted(e.model or "none" for e in estimates)),
        )
        for device, estimates in shown.by_device.items()
    ]
    return table("predicted costs", ("device", "work", "moved", "time", "predicted by"), rows)


@table_of.register
def _(shown: OptimizationPlan) -> str:
    rows = [
        (
            r.optimization,
            "yes" if r.applied else "no",
            r.reason,
            f"{duration(r.seconds_before)} to {duration(r.seconds_after)}" if r.applied else "",
        )
        for r in shown.results
    ]
    return table(f"plan: {len(shown.nodes):,} ops run", ("optimization", "applied", "reason", "time"), rows)


@table_of.register
def _(shown: Placement) -> str:
    decided = Counter((d.device, d.reason) for d in shown.decisions)
    rows = [(device, f"{count:,}", reason) for (device, reason), count in decided.most_common()]
    repeated = Counter((r.device, r.reason) for r in shown.replicas)
    rows += [(f"{device} as well", f"{count:,}", reason) for (device, reason), count in repeated.most_common()]
    return table(f"placement by {shown.policy or 'no policy'}", ("device", "ops", "reason"), rows)


@table_of.register
def _(shown: ExecutionSchedule) -> str:
    groups = [(f"{g.stage}", g.device, f"{len(g.nodes):,}", g.strategy.value) for g in shown.groups]
    steps = [
        (device, listed(counted(type(step).__name__.lower() for step in made))) for device, made in shown.steps.items()
    ]
    title = f"schedule by {shown.scheduler or 'no scheduler'}: {'; '.join(shown.reasons)}"
    return table(title, ("stage", "device", "ops", "strategy"), groups) + table("steps", ("device", "steps"), steps)


@table_of.register
def _(shown: PipelineResult) -> str:
    return f"<pre>{text(explain(shown))}</pre>"
