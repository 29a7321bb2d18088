"""Contents of a picture: a box for each part of a program, with the arrows between its inner boxes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property

import attrs
import networkx as nx

from djinn.planning import ExecutionPhase, PipelineResult
from djinn_core.planning.units import duration, share, size, work
from djinn_observability.html.colours import MIXED
from djinn_observability.html.layering import LayeredRows, lay_out
from djinn_profiler.explain.outline import Part, by_call, outline
from djinn_profiler.explain.survey import Facts, Survey, first_few

BOXES = 40  # that are shown at first
_LITTLE = 0.03  # share of the time below which boxes stay closed
_MIN_PHASE_SHARE = 0.9  # share of a box's ops that must have one phase
_CHIPS = 3  # patterns to name on a closed box


@attrs.frozen
class Box:
    """One part of a program in a picture.

    Attributes:
        title: name and class of the part.
        detail: cost of the part.
        kind: class of the part, or its name if the class is unknown.
        chips: names of the patterns in the part.
        own_chips: names of the patterns that are in no inner box.
        tip: all facts about the part, one per line.
        phase: phase of nearly all ops, or `MIXED`.
        share: share of the program's predicted time; without predictions, share of its ops.
        count: number of equal parts that the box stands for.
        is_own: True if the part consists of ops that belong to no inner module.
        inner: inner boxes.
        layout: rows and arrows of the inner boxes, or None without inner boxes.
    """

    title: str
    kind: str
    detail: str
    chips: tuple[str, ...]
    own_chips: tuple[str, ...]
    tip: str
    phase: str
    share: float
    count: int
    is_own: bool
    inner: tuple[Box, ...] = ()
    layout: LayeredRows | None = None

    def __iter__(self) -> Iterator[Box]:
        """Iterate over this box and all inner boxes."""
        yield self
        for box in self.inner:
            yield from box


def scene(result: PipelineResult) -> Box:
    """Return the box of the whole program."""
    root = outline(result.graph, result.profile, by_call)
    return _SceneBuilder(result, Survey(result, root)).box(root)


def open_boxes(root: Box, limit: int = BOXES) -> frozenset[int]:
    """Return the `id`s of the boxes to open at first: the slowest, so that at most `limit` boxes are visible."""
    choice = _OpenBoxes(limit)
    choice.open_slowest(root)
    return frozenset(choice.opened_ids)


@attrs.define
class _OpenBoxes:
    limit: int
    opened_ids: set[int] = attrs.field(factory=set)
    _visible: int = 1
    _open_structures: set[Hashable] = attrs.field(factory=set)

    def open_slowest(self, root: Box) -> None:
        closed = [root]
        while closed:
            box = max(closed, key=lambda b: b.share)  # the first of equals
            closed.remove(box)
            structure = _structure(box)
            if (
                self._visible - 1 + len(box.inner) > self.limit
                or structure in self._open_structures
                or box.share < _LITTLE
            ):
                continue
            self._open_structures.add(structure)
            self.opened_ids.add(id(box))
            self._visible += len(box.inner) - 1
            closed += [inner for inner in box.inner if inner.inner]


def _structure(box: Box) -> Hashable:
    """Return a key that is equal for boxes of the same structure. Sizes do not matter."""
    return box.kind, box.phase, tuple(map(_structure, box.inner)) or box.is_own


@attrs.define(slots=False)
class _SceneBuilder:
    result: PipelineResult
    survey: Survey

    def box(self, part: Part) -> Box:
        """Return the box of a part, with its inner boxes."""
        facts = self.survey.facts(part)
        inner, edges, entering, leaving = self._content(part)
        boxes = tuple(map(self.box, inner))
        return Box(
            title=_title(part, facts),
            kind=part.kind or re.sub(r"\d+", "#", part.name),
            detail=self._detail(facts),
            chips=_chips(facts, boxes),
            own_chips=_chips(facts, ()),
            tip=self._tip(part, facts),
            phase=_phase(facts),
            share=self._share(facts),
            count=part.count,
            is_own=part.is_own,
            inner=boxes,
            layout=lay_out(len(inner), edges, entering, leaving) if inner else None,
        )

    @cached_property
    def _total_facts(self) -> Facts:
        return self.survey.facts(self.survey.whole)

    def _share(self, facts: Facts) -> float:
        if self._total_facts.seconds:
            return facts.seconds / self._total_facts.seconds
        return facts.ops / max(self._total_facts.ops, 1)

    def _detail(self, facts: Facts) -> str:
        if not self.survey.has_costs:
            return f"{facts.ops:,} ops"
        worked = [work(facts.flops)] if facts.flops else []
        where = [f"on {first_few(list(facts.devices), 1)}"] if self.survey.is_spread and facts.devices else []
        return " · ".join([share(facts.seconds, self._total_facts.seconds), duration(facts.seconds), *worked, *where])

    def _tip(self, part: Part, facts: Facts) -> str:
        lines = [" ".join(filter(None, [part.path or part.name, part.kind and f"({part.kind})"]))]
        if part.count > 1:
            lines.append(f"{part.count} equal parts, counted together")
        lines.append(f"{facts.ops:,} ops: " + ", ".join(f"{n} {c:,}" for n, c in list(facts.operations.items())[:8]))
        lines += [f"phase {phase}: {count:,} ops" for phase, count in facts.phases.items()]
        if self.survey.has_costs:
            lines.append(f"{work(facts.flops)}, {size(facts.bytes_moved)} moved, {duration(facts.seconds)}")
        lines += [f"{kind}: {size(nbytes)}" for kind, nbytes in facts.resident_bytes.items()]
        lines += [f"on {device}: {count:,} ops" for device, count in facts.devices.items()]
        lines += [f"{f.pattern} ({f.confidence:.2f}): {f.reason}" for f in facts.patterns]
        return "\n".join(filter(None, lines))

    @cached_property
    def _sources(self) -> dict[int, list[int]]:
        """Return for each node the nodes whose data it uses."""
        return {
            node: [source for source in dict.fromkeys(sources) if source >= 0]
            for node, sources in enumerate(self.result.graph.flow.sources)
        }

    @cached_property
    def _users(self) -> dict[int, list[int]]:
        users: dict[int, list[int]] = defaultdict(list)
        for target, sources in self._sources.items():
            for source in sources:
                users[source].append(target)
        return users

    def _content(self, part: Part) -> tuple[list[Part], list[tuple[int, int]], list[int], list[int]]:
        """Return the inner parts of a box, the arrows between them, and the parts with arrows from and to outside."""
        positions = {n: i for i, inner in enumerate(part.parts) for n in inner.nodes}
        sample = frozenset(part.sample)
        entry, leave = len(part.parts), len(part.parts) + 1
        flow: nx.DiGraph[int] = nx.DiGraph()
        flow.add_nodes_from(range(len(part.parts)))
        for node in part.sample if part.parts else ():
            for source in self._sources[node]:
                if source in sample or self._draws_flow(source, node):
                    flow.add_edge(positions[source] if source in sample else entry, positions[node])
            if any(user not in sample and self._draws_flow(node, user) for user in self._users[node]):
                flow.add_edge(positions[node], leave)
        flow.remove_edges_from(list(nx.selfloop_edges(flow)))
        children = self._drawn_parts(part, flow)
        number = {old: new for new, old in enumerate(children)}
        edges = [(number[a], number[b]) for a, b in flow.edges if a in number and b in number]
        entering = [number[b] for a, b in flow.edges if a == entry and b in number]
        leaving = [number[a] for a, b in flow.edges if b == leave and a in number]
        return [part.parts[i] for i in children], sorted(edges), entering, leaving

    def _draws_flow(self, source: int, user: int) -> bool:
        """Return True if an arrow from `source` to `user` is drawn: none enters a training phase from another phase."""
        phases = self.result.profile.phases if self.result.profile is not None else ()
        return not phases or phases[source] is phases[user] or not phases[user].is_training

    def _drawn_parts(self, part: Part, flow: nx.DiGraph[int]) -> Sequence[int]:
        """Return the indices of the parts to draw. Parts with only views are left out: arrows pass through them."""
        views = self.result.graph.flow.pass_through
        hidden = [i for i, p in enumerate(part.parts) if p.is_own and all(views[n] for n in p.nodes)]
        if len(hidden) == len(part.parts):
            return range(len(part.parts))
        for index in hidden:
            flow.add_edges_from((a, b) for a in flow.predecessors(index) for b in list(flow.successors(index)))
            flow.remove_node(index)
        return [i for i in range(len(part.parts)) if i in flow]


def _title(part: Part, facts: Facts) -> str:
    if part.is_own:
        return first_few(facts.slowest_ops)
    times = f" x{part.count}" if part.count > 1 else ""
    kind = f" · {part.kind}" if part.kind and part.kind != part.name else ""
    return f"{part.name}{times}{kind}"


def _phase(facts: Facts) -> str:
    counts = {phase: count for phase, count in facts.phases.items() if phase != ExecutionPhase.UNKNOWN.value}
    if not counts or max(counts.values()) >= _MIN_PHASE_SHARE * sum(counts.values()):
        return facts.phase
    return MIXED


def _chips(facts: Facts, inner: Sequence[Box]) -> tuple[str, ...]:
    """Return the patterns of a box, followed by the patterns of its inner boxes."""
    names = [pattern.pattern for pattern in facts.patterns]
    names += [chip for box in inner for chip in box.chips]
    return tuple(dict.fromkeys(names))[:_CHIPS]
