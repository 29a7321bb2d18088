"""A compiler for Djinn: run a template as Python code that `torch.fx` generates."""

from __future__ import annotations

from djinn.hooks import Compiler, CompilerContext, Replay, hookimpl

djinn_api_version = "2.0"


class ExampleCompiler(Compiler):
    """Used if `djinn.configure(compilers=["example"])` names it."""

    name = "example"

    def compile(self, context: CompilerContext) -> Replay | None:
        """Return a replay with the same results; None would mean that the executor's own replay is best."""
        module = context.graph_module
        return lambda inputs: module(*inputs)


@hookimpl
def djinn_register_compilers() -> list[Compiler]:
    """Return the compilers of this plugin."""
    return [ExampleCompiler()]
