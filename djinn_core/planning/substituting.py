"""Apply the substitutions of optimizations to a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from djinn_core.errors import InvalidStage
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import storage_of
from djinn_core.ir.plan import OptimizationResult
from djinn_core.ir.profile import DataResidency, WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.substitution import RewrittenProgram, Substitution
from djinn_core.logs import get_logger

# Records substitution code. Arguments: the program, the substitutions, and the persistent inputs. Only clients have
# one.
Rewrite: TypeAlias = Callable[[Program, Sequence[Substitution], frozenset[int]], RewrittenProgram]

_log = get_logger("djinn.pipeline")


def persistent_weights(graph: Graph, profile: WorkloadProfile) -> frozenset[int]:
    """Return the weights that the program does not write. Values that depend only on them are computed once."""
    written_storages = {storage_of(v) for node in graph.nodes for v in node.writes}
    kinds = profile.residency
    return frozenset(
        v
        for v in graph.inputs
        if kinds.get(v) is DataResidency.PERSISTENT_WEIGHT and storage_of(v) not in written_storages
    )


def substitute(
    graph: Graph, profile: WorkloadProfile, results: Sequence[OptimizationResult], rewrite: Rewrite | None
) -> RewrittenProgram | str:
    """Return the program with all substitutions applied, or the reason why none is applied.

    A failure of `rewrite` is logged.
    """
    if rewrite is None:
        return "no device of this process can record it"
    substitutions = [s for result in results for s in result.rewrite.substitutions]
    try:
        return rewrite(graph.program, substitutions, persistent_weights(graph, profile))
    except Exception as error:  # runs plugin code
        names = ", ".join(result.optimization for result in results)
        why = str(error) if isinstance(error, InvalidStage) else f"its code raised {type(error).__name__}: {error}"
        _log.warning("substitutions cannot be recorded; the program is not changed", by=names, error=why)
        return f"{names}: {why}" if len(results) > 1 else why
