"""Workload of a program, sent with its template: the model, and the number of attention queries."""

from __future__ import annotations

from typing import Final

from djinn_core.ir.module_path import module_chain
from djinn_core.ir.op_families import FUSED_ATTENTION, SOFTMAX
from djinn_core.ir.program import Program
from djinn_core.wire.messages import Workload

_NAME_LIMIT: Final = 64  # character limit
_RANK: Final = 4  # dimensions of queries and of attention scores: batch, heads, queries, width


def workload_of(program: Program) -> Workload | None:
    """Return the workload of a program. Return None if it has neither a module nor attention."""
    module_call = next((call for call in program.modules if call is not None), None)
    modules = module_chain(module_call) if module_call is not None else ()
    model = type(modules[0]).__name__[:_NAME_LIMIT] if modules else ""
    queries = 0
    for call in program.calls:
        op = call.signature.form.op.partition("::")[2].partition(".")[0]
        if (op in FUSED_ATTENTION or op in SOFTMAX) and len(shape := call.operands[0].shape) == _RANK:
            queries = max(queries, shape[-2])
    return Workload(model, queries) if model or queries else None
