"""Find state, other than weights, that a program takes from earlier programs or leaves for later programs."""

from __future__ import annotations

from djinn.hooks import OptimizationContext
from djinn.planning import DataResidency, storage_of


def reason_to_run_in_order(context: OptimizationContext) -> str:
    """Return the reason why programs of this structure must run in order, or "" if they are independent."""
    graph = context.graph
    nodes = [graph.nodes[n] for n in context.plan.nodes]
    random = next((n for n in nodes if n.random), None)
    if random is not None:
        return f"{random.op} draws random numbers, so programs must run in order"
    inputs = {storage_of(v) for v in graph.inputs}
    for node in nodes:
        if any(storage_of(context.plan.replace.get(v, v)) in inputs for v in node.writes):
            return f"{node.op}{_module_note(node.module)} writes a value that the next program may read"
    if context.stream.carried:
        return "the program uses values that an earlier program computed"
    state = next((v for v in graph.outputs if _is_state(context, v)), None)
    if state is not None:
        return f"the program leaves a {context.profile.residency[state].value.replace('_', ' ')} to the next program"
    return ""


_STATE = frozenset({DataResidency.STATEFUL_KV_CACHE, DataResidency.GRADIENT, DataResidency.OPTIMIZER_STATE})


def _is_state(context: OptimizationContext, value: int) -> bool:
    return context.profile.residency.get(value) in _STATE


def _module_note(module: str) -> str:
    return f" in {module}" if module else ""
