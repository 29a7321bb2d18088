"""Text of each stage's decisions: a heading per stage, a line per decision with its reason, and the tree of modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any, Self

import attrs

from djinn_core.ir.result import PipelineResult
from djinn_core.planning.units import duration, share, size, work
from djinn_profiler.explain.described import describe
from djinn_profiler.explain.survey import first_few

_SHOWN = 12  # lines of one kind to print before the rest is summarised
_WIDTH = 120
_WORDS = {
    "persistent_weight": "weights",
    "stateful_kv_cache": "KV cache",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "input": "inputs",
    "ephemeral_activation": "activations",
}


class Explanation(str):
    """Text that prints unquoted, also at the prompt.

    Attributes:
        described: the same facts as JSON values.
    """

    __slots__ = ("described",)
    described: dict[str, Any]

    def __new__(cls, text: str, described: dict[str, Any]) -> Self:  # noqa: D102 - as of any class
        explanation = super().__new__(cls, text)
        explanation.described = described
        return explanation

    def __repr__(self) -> str:
        return str(self)


def explain(result: PipelineResult, *, unfold: bool = False, depth: int | None = None) -> Explanation:
    """Return a text with the decisions of every stage that ran.

    Args:
        result: the pipeline's result.
        unfold: True to list equal layers one by one.
        depth: number of listed module levels. None means all levels.
    """
    description = describe(result, unfold=unfold)
    lines: list[str] = []
    for stage, format_stage in _FORMATTERS.items():
        if stage in description:
            seconds = description["seconds"].get(stage)
            lines.append(f"{stage}{f'  ({duration(seconds)})' if seconds else ''}")
            lines += [f"  {line}" for line in format_stage(description[stage])]
    lines += ["modules", *(f"  {line}" for line in tree(description["modules"], depth))]
    return Explanation("\n".join(lines), description)


@attrs.frozen
class _TreeRow:
    label: str
    cells: tuple[str, ...]
    notes: tuple[str, ...] = ()  # matches, below the row
    under: str = ""  # prefix of the lines below


def tree(whole: dict[str, Any], depth: int | None = None) -> Iterator[str]:
    """Yield the lines of a tree of modules: a row per module, and its matches below. `depth`: levels (None: all)."""
    titles = ("phase", "ops", "work", "moved", "time", "share") if "seconds" in whole else ("phase", "ops")
    rows = [_TreeRow("", (*titles, "holds")), *_rows(whole, whole, depth, "", "")]
    label = max(len(row.label) for row in rows)
    widths = [max(len(row.cells[c]) for row in rows) for c in range(len(titles))]
    for row in rows:
        numbers = [
            f"{cell:<{w}}" if not c else f"{cell:>{w}}"
            for c, (cell, w) in enumerate(zip(row.cells, widths, strict=False))
        ]
        yield "  ".join([f"{row.label:<{label}}", *numbers, row.cells[-1]]).rstrip()
        for note in row.notes:
            yield from wrap(note, _WIDTH, initial_indent=f"{row.under}· ", subsequent_indent=f"{row.under}  ")


def _rows(part: dict[str, Any], whole: dict[str, Any], depth: int | None, head: str, under: str) -> Iterator[_TreeRow]:
    children = part["parts"] if depth != 0 else []
    notes = tuple(note for match in part["patterns"] for note in _decision_lines(match))
    yield _TreeRow(head + _label(part), _cells(part, whole), notes, f"{under}{'│  ' if children else '   '}")
    below = None if depth is None else depth - 1
    for child in children:
        last = child is children[-1]
        yield from _rows(
            child, whole, below, f"{under}{'└─ ' if last else '├─ '}", f"{under}{'   ' if last else '│  '}"
        )


def _label(part: dict[str, Any]) -> str:
    if not part["name"]:
        return f"({first_few(part['dearest'])})"
    times = f" x{part['count']}" if part["count"] > 1 else ""
    kind = f"  {part['class']}" if part["class"] and part["class"] != part["name"] else ""
    return f"{part['name']}{times}{kind}"


def _cells(part: dict[str, Any], whole: dict[str, Any]) -> tuple[str, ...]:
    cost: tuple[str, ...] = ()
    if "seconds" in part:
        share_of_time = share(part["seconds"], whole["seconds"])
        worked = work(part["flops"]) if part["flops"] else "-"
        cost = (worked, size(part["bytes_moved"]), duration(part["seconds"]), share_of_time)
    phase = next((p for p in part["phases"] if p != "unknown"), "")
    more = "+" if len([p for p in part["phases"] if p != "unknown"]) > 1 else ""
    memory = [
        f"{size(nbytes)} {_WORDS.get(kind, kind)}" for kind, nbytes in part["bytes_by_residency"].items() if nbytes
    ]
    where = [f"on {', '.join(part['devices'])}"] if len(whole["devices"]) > 1 else []
    return (phase + more, f"{part['ops']:,}", *cost, ", ".join([*memory, *where]))


def _decision_lines(match: dict[str, Any]) -> Iterator[str]:
    times = f" x{match['count']}" if match["count"] > 1 else ""
    fields = {n: f for n, f in match["details"].items() if f is not None and not isinstance(f, dict | list)}
    facts = ", ".join(f"{name} {fact}" for name, fact in fields.items())
    yield f"{match['pattern']}{times} ({match['confidence']:.2f}): {match['reason']}{f'; {facts}' if facts else ''}"
    for decision in match["decisions"]:
        about = f"{decision['about']} ({decision['by']}): " if decision["about"] else ""
        gain = ""
        if decision["seconds_before"] is not None:
            times = f"{duration(decision['seconds_before'])} to {duration(decision['seconds_after'])}"
            gain = f", predicted {times}{measured(decision['measured'])}"
        yield f"→ {about}{decision['decision']}{gain}"


def measured(trials: dict[str, Any] | None) -> str:
    """Return the measured times of trials as a suffix of a line, or an empty text without trials."""
    if trials is None:
        return ", not measured"
    return f", measured {duration(trials['before'])} to {duration(trials['after'])} ({trials['runs']} runs each)"


def format_counts(counts: dict[str, int]) -> str:
    """Return names with their counts, shortened to the length of a line."""
    counts_shown = [f"{name} {count:,}" for name, count in list(counts.items())[:_SHOWN]]
    hidden = sum(list(counts.values())[_SHOWN:])
    return ", ".join([*counts_shown, f"others {hidden:,}"] if hidden else counts_shown) or "none"


def _graph_lines(part: dict[str, Any]) -> Iterator[str]:
    yield f"{part['nodes']:,} nodes, {part['inputs']:,} inputs, {part['outputs']:,} outputs"
    yield f"topology {part['topology_hash']}, shapes {part['shape_hash']}"
    yield f"ops: {format_counts(part['operations'])}"


def _profile_lines(part: dict[str, Any]) -> Iterator[str]:
    yield f"workload {part['workload']}: {'; '.join(part['reasons'])}"
    yield f"phases: {format_counts(part['phases'])}"
    yield f"modalities: {format_counts(part['modalities'])}"
    sizes = part["bytes_by_residency"]
    kinds = [f"{n:,} {_WORDS.get(k, k)} ({size(sizes[k])})" for k, n in part["residency"].items()]
    yield f"values: {', '.join(kinds) or 'none'}"
    sure: dict[str, list[float]] = {}
    for match in part["patterns"]:
        sure.setdefault(match["pattern"], []).append(match["confidence"])
    patterns = [f"{name} {len(matches)} ({_range(matches)})" for name, matches in sure.items()]
    yield f"patterns, and how sure they are: {', '.join(patterns) or 'none'}"


def _range(numbers: Sequence[float]) -> str:
    low, high = f"{min(numbers):.2f}", f"{max(numbers):.2f}"
    return low if low == high else f"{low} to {high}"


def _costs_lines(part: dict[str, Any]) -> Iterator[str]:
    yield f"{work(part['flops'])} of products, convolutions and attention"
    for device, cost in part["devices"].items():
        bytes_moved = size(cost["bytes_read"] + cost["bytes_written"])
        by = f"predicted by {format_counts(cost['models'])}"
        yield f"{device}: {duration(cost['seconds'])}, {bytes_moved} moved, {by} ({cost['speeds']})"
    if part["dearest"]:
        yield "slowest: " + ", ".join(f"{d['op']} {duration(d['seconds'])}" for d in part["dearest"])


def _plan_lines(part: dict[str, Any]) -> Iterator[str]:
    yield f"{part['nodes']:,} of {part['nodes_before']:,} nodes run"
    for r in part["optimizations"]:
        prediction = (
            f", predicted {duration(r['seconds_before'])} to {duration(r['seconds_after'])}" if r["applied"] else ""
        )
        prediction += measured(r["measured"]) if r["applied"] or r["measured"] else ""
        yield f"{r['optimization']} {'applied' if r['applied'] else 'not applied'}: {r['reason']}{prediction}"
    if part["hints"]:
        yield f"hints: {format_counts(part['hints'])}"


def _placement_lines(part: dict[str, Any]) -> Iterator[str]:
    yield f"policy {part['policy']}"
    for refusal in part["refused"][:_SHOWN]:
        yield f"not {refusal}"
    for decision in part["decisions"][:_SHOWN]:
        yield f"{decision['nodes']:,} nodes on {decision['device']}: {decision['reason']}"
    if len(part["decisions"]) > _SHOWN:
        yield f"and {len(part['decisions']) - _SHOWN} more reasons"
    for replica in part["replicas"][:_SHOWN]:
        yield f"{replica['nodes']:,} nodes on {replica['device']} as well: {replica['reason']}"


def _schedule_lines(part: dict[str, Any]) -> Iterator[str]:
    yield f"scheduler {part['scheduler']}: {'; '.join(part['reasons'])}"
    for group in part["groups"][:_SHOWN]:
        yield f"stage {group['stage']}: {group['nodes']:,} nodes on {group['device']}, {group['strategy']}"
    if len(part["groups"]) > _SHOWN:
        yield f"and {len(part['groups']) - _SHOWN} more groups"
    for device, steps in part["steps"].items():
        yield f"{device}: {format_counts(steps)}"


_FORMATTERS = {
    "graph": _graph_lines,
    "annotate": _profile_lines,
    "estimate": _costs_lines,
    "optimize": _plan_lines,
    "place": _placement_lines,
    "schedule": _schedule_lines,
}
