"""The outline of a program: its ops by the modules that issued them, as a tree. Equal layers are folded into one part."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Generic, TypeVar

import attrs

from djinn_core.ir.graph import Graph
from djinn_core.ir.module_names import ModuleNames
from djinn_core.ir.profile import ExecutionPhase, WorkloadProfile

T = TypeVar("T")
_MAX_ROUND_PARTS = 12  # parts of a round
_NUMBER = re.compile(r"\d+")
PROGRAM = "program"  # name of the root if it holds more than one module
_SECTIONS = {
    ExecutionPhase.TRAINING_FORWARD: "forward",
    ExecutionPhase.TRAINING_BACKWARD: "backward",
    ExecutionPhase.TRAINING_OPTIMIZER: "optimizer",
}


@attrs.frozen
class Part:
    """A module, a section of a training step, or ops that a module issued itself between calls of submodules.

    If several equal parts are folded, the part stands for all of them.

    Attributes:
        name: the last name of the path, such as `layers.0-31` or `q_proj`; empty for ops of the enclosing module.
        path: names from the outermost module to this part; for folded parts, the path of the first.
        kind: class of the module; empty if unknown.
        nodes: ids of all its ops, including ops of submodules and of folded parts.
        parts: its submodules, in program order; for folded parts, those of the first.
        count: number of equal parts that are folded into this part.
        calls: number of calls.
        sample: ids of the ops of the first folded part.
    """

    name: str
    path: str
    kind: str
    nodes: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    count: int = 1
    calls: int = 1
    sample: tuple[int, ...] = attrs.field(default=attrs.Factory(lambda part: part.nodes, takes_self=True), repr=False)

    @cached_property
    def members(self) -> frozenset[int]:
        """Return `nodes` as a set."""
        return frozenset(self.nodes)

    @property
    def is_own(self) -> bool:
        """Return True if the enclosing module itself issued the ops."""
        return not self.name


Grouping = Callable[[Sequence[int], Callable[[int], Hashable]], Iterable[tuple[Hashable, list[int], int]]]


def by_name(nodes: Sequence[int], key: Callable[[int], Hashable]) -> Iterable[tuple[Hashable, list[int], int]]:
    """Yield a group for each module: its key, its ops of all calls, and the number of calls."""
    groups: dict[Hashable, list[int]] = {}
    calls: dict[Hashable, int] = {}
    for name, run in groupby(nodes, key):
        groups.setdefault(name, []).extend(run)
        calls[name] = calls.get(name, 0) + 1
    return [(name, group, calls[name]) for name, group in groups.items()]


def by_call(nodes: Sequence[int], key: Callable[[int], Hashable]) -> Iterable[tuple[Hashable, list[int], int]]:
    """Yield a group for each run of consecutive ops of a module, in program order: key, ops, and 1 as number of calls."""
    return [(name, list(run), 1) for name, run in groupby(nodes, key)]


def outline(
    graph: Graph, profile: WorkloadProfile | None = None, grouping: Grouping = by_name, *, unfold: bool = False
) -> Part:
    """Return the outline of a graph.

    Args:
        graph: the graph.
        profile: its profile; layers of different phases are not equal.
        grouping: `by_name` or `by_call`.
        unfold: True to list equal layers one by one.
    """
    maker = _OutlineBuilder(graph, profile, grouping, unfold)
    whole = maker.part(PROGRAM, "", "", tuple(range(len(graph.nodes))), 0)
    return whole.parts[0] if len(whole.parts) == 1 and not whole.parts[0].is_own else whole


@attrs.define(slots=False)
class _OutlineBuilder:
    graph: Graph
    profile: WorkloadProfile | None
    grouping: Grouping
    unfold: bool

    def part(self, name: str, path: str, kind: str, nodes: tuple[int, ...], depth: int, calls: int = 1) -> Part:
        """Return the part with these nodes. Their paths agree in the first `depth` steps."""
        routes = self.routes

        def step(node: int) -> _PathStep | None:
            return routes[node][depth] if depth < len(routes[node]) else None

        groups = list(self.grouping(nodes, step))
        if not name or (len(groups) == 1 and groups[0][0] is None):
            return Part(name, path, kind, nodes, (), 1, calls)
        parts = [self._inner_part(key, group, depth, count) for key, group, count in groups]
        return Part(name, path, kind, nodes, tuple(parts if self.unfold else self._fold_parts(parts)), 1, calls)

    def _inner_part(self, key: Hashable, group: list[int], depth: int, calls: int) -> Part:
        if not isinstance(key, _PathStep):
            return Part("", "", "", tuple(group), (), 1, calls)
        return self.part(key.name, key.path, key.kind, tuple(group), depth + 1, calls)

    def _fold_parts(self, parts: list[Part]) -> list[Part]:
        return [_merge_rounds(f) for f in fold(parts, self._signature, lambda part: part.name)]

    @cached_property
    def _numbers(self) -> dict[Hashable, int]:
        return {}

    @cached_property
    def _part_signatures(self) -> dict[int, tuple[Part, int]]:
        return {}

    def _signature(self, part: Part) -> int:
        """Return a number that is equal for parts with equal ops."""
        signature = self._part_signatures.get(id(part))
        if signature is None:
            inner: tuple[Hashable, ...] = tuple([self._signature(p) for p in part.parts])
            inner = inner or tuple([self._ops[n] for n in part.nodes])
            key = (part.kind, part.count, inner)
            signature = self._part_signatures[id(part)] = part, self._numbers.setdefault(key, len(self._numbers))
        return signature[1]

    @cached_property
    def _ops(self) -> list[Hashable]:
        """Return a description of each node: its op, the metadata of its results, and its phase."""
        profile = self.profile
        phases = profile.phases if profile is not None else [None] * len(self.graph.nodes)
        metas = [tuple([id(self.graph.meta(v)) for v in node.outputs]) for node in self.graph.nodes]
        return [(node.op, results, phase) for node, results, phase in zip(self.graph.nodes, metas, phases, strict=True)]

    @cached_property
    def routes(self) -> list[tuple[_PathStep, ...]]:
        """Return each node's path, from the outermost module to the module that issued it."""
        router = _Router(self.graph.module_names)
        routes = [router.route(node.id, node.module) for node in self.graph.nodes]
        sections = self._sections()
        return [(section, *route) if section else route for section, route in zip(sections, routes, strict=True)]

    def _sections(self) -> list[_PathStep | None]:
        phases = self.profile.phases if self.profile is not None else ()
        names = [_SECTIONS.get(phase) for phase in phases]
        if len(set(names) - {None}) <= 1:
            return [None] * len(self.graph.nodes)
        return [_PathStep(name, name, "") if name else None for name in names]


@attrs.frozen
class _PathStep:
    """A module on the path to a node.

    Equal steps are the same module in the same call of the outermost module.
    """

    name: str
    path: str
    kind: str = attrs.field(eq=False)
    run: int = -1


@attrs.define(eq=False)
class _Router:
    """Find the path from the outermost module to the module that issued a node."""

    names: ModuleNames
    _numbers: dict[tuple[int, str], tuple[_PathStep, ...]] = attrs.field(factory=dict)

    def route(self, node: int, path: str) -> tuple[_PathStep, ...]:
        run = self.names.runs.get(node, -1)
        if run < 0 and not path:
            return ()
        route = self._numbers.get((run, path))
        if route is None:
            route = self._numbers[run, path] = self._steps(run, path)
        return route

    def _steps(self, run: int, path: str) -> tuple[_PathStep, ...]:
        value_names = self.names.called if run >= 0 else {}
        steps = [_PathStep(value_names.get((run, ""), "model"), "", value_names.get((run, ""), ""), run)]
        names, start = path.split(".") if path else [], 0
        for end in range(1, len(names) + 1):
            path_so_far = ".".join(names[:end])
            last = end == len(names)
            if last or ((run, path_so_far) in value_names if value_names else not names[end].isdigit()):
                steps.append(
                    _PathStep(".".join(names[start:end]), path_so_far, value_names.get((run, path_so_far), ""), run)
                )
                start = end
        return tuple(steps)


def _merge_rounds(folded: FoldedRounds[Part]) -> Part:
    """Merge all rounds of a folded repetition into one part."""
    rounds = folded.rounds
    if len(rounds) == 1 and len(rounds[0]) == 1:
        return rounds[0][0]
    members = [merge_parts([r[position] for r in rounds]) for position in range(len(rounds[0]))]
    if len(members) == 1:
        return attrs.evolve(members[0], count=len(rounds) * members[0].count)
    nodes = tuple(sorted(n for member in members for n in member.nodes))
    sample = tuple(n for part in rounds[0] for n in part.sample)
    name = _range_name([part.name for r in rounds for part in r if part.name])
    return Part(
        name if name and "…" not in name else ", ".join(part.name for part in members if part.name),
        members[0].path,
        "",
        nodes,
        tuple(members),
        len(rounds),
        len(rounds),
        sample,
    )


def merge_parts(parts: Sequence[Part]) -> Part:
    """Merge equal parts into one part with the ops of all of them."""
    first = parts[0]
    nodes = tuple(sorted(n for part in parts for n in part.nodes))
    inner = tuple(merge_parts(same) for same in zip(*[part.parts for part in parts], strict=True))
    name = _range_name([part.name for part in parts])
    return Part(
        name, first.path, first.kind, nodes, inner, first.count, sum(part.calls for part in parts), first.sample
    )


def _range_name(names: Sequence[str]) -> str:
    """Return `layers.0-31` for names that differ in one number; with gaps `layers.0,2-30`."""
    distinct = list(dict.fromkeys(names)) or [""]
    first, last = distinct[0], distinct[-1]
    if len(distinct) == 1:
        return first
    head, tail = _common_affixes(first, last)
    numbers = [name[len(head) : len(name) - len(tail)] for name in distinct]
    if not all(number.isdigit() for number in numbers):
        return f"{first} … {last}"
    if abs(int(numbers[-1]) - int(numbers[0])) == len(numbers) - 1:
        return f"{head}{numbers[0]}-{numbers[-1]}{tail}"
    return f"{head}{numbers[0]},{numbers[1]}{f'-{numbers[-1]}' if len(numbers) > 2 else ''}{tail}"


def _common_affixes(first: str, second: str) -> tuple[str, str]:
    """Return the common prefix and suffix of two names. Numbers are not split."""
    head = 0
    while head < min(len(first), len(second)) and first[head] == second[head]:
        head += 1
    while head and first[head - 1].isdigit():
        head -= 1
    tail = 0
    while tail < min(len(first), len(second)) - head and first[-1 - tail] == second[-1 - tail]:
        tail += 1
    while tail and first[len(first) - tail].isdigit():
        tail -= 1
    return first[:head], first[len(first) - tail :] if tail else ""


@attrs.frozen
class FoldedRounds(Generic[T]):
    """Consecutive equal rounds of parts, such as equal layers. A part that is not repeated is a single round."""

    rounds: tuple[tuple[T, ...], ...]


def fold(parts: Sequence[T], signature: Callable[[T], int], name: Callable[[T], str]) -> list[FoldedRounds[T]]:
    """Return parts with repetitions folded. Parts are equal if their signatures are equal and names differ in numbers only."""
    marks = [(signature(part), _NUMBER.sub("#", name(part))) for part in parts]
    has_number = [bool(_NUMBER.search(name(part))) for part in parts]
    folded: list[FoldedRounds[T]] = []
    start = 0
    while start < len(parts):
        period, count = _repeat(marks, has_number, start)
        rounds = [tuple(parts[start + r * period : start + (r + 1) * period]) for r in range(count)]
        folded.append(FoldedRounds(tuple(rounds)))
        start += period * count
    return folded


def _repeat(marks: Sequence[tuple[int, str]], numbered: Sequence[bool], start: int) -> tuple[int, int]:
    """Return period and count of the longest repetition at `start`. Of equal lengths, the shortest period wins."""
    best = (1, 1)
    for period in range(1, min(_MAX_ROUND_PARTS, (len(marks) - start) // 2) + 1):
        if not any(numbered[start : start + period]):
            continue
        count = 1
        while marks[start + count * period : start + (count + 1) * period] == marks[start : start + period]:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best
