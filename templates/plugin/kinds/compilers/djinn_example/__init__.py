"""A compiler for Djinn: runs a template as `torch.fx` generated it, without going through instructions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from djinn.hooks import Compiler, CompilerContext, Replay, hookimpl

djinn_api_version = 1


class ExampleCompiler:
    """Used where `djinn.configure(compilers=["example"])` names it."""

    name = "example"

    def compile(self, context: CompilerContext) -> Replay | None:
        """A replay with the same results, or None if there is nothing better."""
        module = context.graph_module
        if not any(node.op == "call_function" for node in module.graph.nodes):
            return None

        def replay(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return tuple(module(*inputs))

        return replay


@hookimpl
def djinn_register_compilers() -> list[Compiler]:
    """The compilers that this plugin offers."""
    return [ExampleCompiler()]
