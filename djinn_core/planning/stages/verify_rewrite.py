"""Validation of rewrites: a rewrite must not change a result that the user's program can observe."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from djinn_core.errors import InvalidStage
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.handles import storage_of
from djinn_core.ir.plan import OptimizationPlan, Rewrite, resolve_chains
from djinn_core.ir.program import interchangeable
from djinn_core.ir.replicas import repeatable


def check_rewrite(
    graph: Graph, plan: OptimizationPlan, rewrite: Rewrite, kept_values: frozenset[int], author: str
) -> None:
    """Reject a rewrite that could change a result.

    Args:
        graph: the graph as recorded.
        plan: the plan without the rewrite.
        rewrite: the proposed change.
        kept_values: values that the client still needs when the program ends.
        author: name of the optimization, for the message.

    Raises:
        InvalidStage: the rewrite is illegal; the message names `author` and the first problem.
    """
    if not (rewrite.drop or rewrite.replace or rewrite.equal_slots or rewrite.replicas):
        return
    problem = next(_RewriteCheck.of(graph, plan, rewrite, kept_values).problems(rewrite), None)
    if problem:
        raise InvalidStage(f"{author} proposed an illegal rewrite: {problem}")


@attrs.frozen
class _RewriteCheck:
    """The program under a rewrite: its running nodes, the values that they use, and their writes."""

    graph: Graph
    kept_values: frozenset[int]
    before: frozenset[int]
    running: tuple[Node, ...]
    replace: dict[int, int]
    used: frozenset[int]
    written: frozenset[int]
    changed: frozenset[int]
    read_after: dict[int, int]
    client_storages: frozenset[int]
    outliving: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, plan: OptimizationPlan, rewrite: Rewrite, kept_values: frozenset[int]) -> _RewriteCheck:
        running = tuple(graph.nodes[i] for i in plan.nodes if i not in rewrite.drop)
        replace = resolve_chains({**plan.replace, **rewrite.replace})
        uses = [(node.id, replace.get(v, v)) for node in running for v in node.inputs]
        client_storages = frozenset(map(storage_of, kept_values))
        return cls(
            graph=graph,
            kept_values=kept_values,
            before=frozenset(plan.nodes),
            running=running,
            replace=replace,
            used=frozenset(v for _, v in uses),
            written=frozenset(storage_of(replace.get(v, v)) for node in running for v in node.writes),
            changed=frozenset(replace.get(v, v) for node in running for v in node.writes),
            read_after={storage_of(v): position for position, v in uses},  # the last reader of each storage
            client_storages=client_storages,
            outliving=client_storages.union(map(storage_of, graph.inputs)),
        )

    def problems(self, rewrite: Rewrite) -> Iterator[str]:
        for node_id in sorted(rewrite.drop):
            yield from self._drop_problems(node_id)
        for value, substitute in rewrite.replace.items():
            yield from self._replacement_problems(value, substitute, rewrite)
        yield from self._slot_problems(rewrite)
        yield from self._replica_problems(rewrite)

    def _drop_problems(self, node_id: int) -> Iterator[str]:
        if node_id not in self.before:
            yield f"it drops node {node_id}, which does not run"
            return
        node = self.graph.nodes[node_id]
        if node.random:
            yield f"it drops {node.op} (node {node_id}), which advances the random state"
        if not node.outputs and not node.writes:
            yield f"it drops {node.op} (node {node_id}), which runs for its effect"
        for value in node.outputs:
            if value in self.kept_values:
                yield f"it drops node {node_id}, whose value {value} the client still holds"
            elif value in self.used:
                yield f"it drops node {node_id}, whose value {value} is still used"
        for value in node.writes:
            storage = storage_of(value)
            if storage in self.outliving or self.read_after.get(storage, -1) > node_id:
                yield f"it drops node {node_id}, whose write to value {value} can be seen later"

    def _replacement_problems(self, value: int, substitute: int, rewrite: Rewrite) -> Iterator[str]:
        maker, substitute_maker = self.graph.producer(value), self.graph.producer(substitute)
        if maker is None or maker.id not in rewrite.drop:
            yield f"it replaces value {value}, whose node is not dropped"
            return
        if substitute in self.replace:
            yield f"value {substitute} stands in for {value} but is replaced itself"
        if substitute_maker is None and substitute not in self.graph.inputs:
            yield f"value {substitute} stands in for {value} but does not exist"
        elif substitute_maker is not None and (
            substitute_maker.id > maker.id
            or substitute_maker.id in rewrite.drop
            or substitute_maker.id not in self.before
        ):
            yield f"value {substitute} stands in for {value} but is computed after it"
        elif self.graph.meta(value) is not self.graph.meta(substitute):
            yield f"value {substitute} stands in for {value} but has other metadata"
        yield from self._merge_conflicts(value, substitute)

    def _merge_conflicts(self, value: int, substitute: int) -> Iterator[str]:
        """Yield the ways in which a program could detect that two values were merged."""
        storage, substitute_storage = storage_of(value), storage_of(substitute)
        if value in self.kept_values:
            yield f"it replaces value {value}, which the client still holds"
        if storage == substitute_storage:  # two views of one memory: an op such as `t_` changes only one view
            if value in self.changed or substitute in self.changed:
                yield f"it makes value {substitute} stand in for {value}, but one of them is changed in place"
            return
        if storage in self.client_storages:
            yield f"it replaces value {value}, whose memory the client still holds"
        if storage in self.written or substitute_storage in self.written:
            yield f"it makes value {substitute} stand in for {value}, but one of them is written"

    def _replica_problems(self, rewrite: Rewrite) -> Iterator[str]:
        for replica in rewrite.replicas:
            if replica.node not in self.before or replica.node in rewrite.drop:
                yield f"it repeats node {replica.node}, which does not run"
            elif not repeatable(self.graph.nodes[replica.node]):
                yield f"it repeats node {replica.node}, which writes, draws random numbers, has an effect or reads beyond its operand"

    def _slot_problems(self, rewrite: Rewrite) -> Iterator[str]:
        slots = [slot for node in self.graph.nodes for slot in node.slots]
        for first, second in rewrite.equal_slots:
            if not (0 <= first < len(slots) and 0 <= second < len(slots)) or not interchangeable(
                slots[first], slots[second]
            ):
                yield f"it holds only while slots {first} and {second} are equal, and they are not"
