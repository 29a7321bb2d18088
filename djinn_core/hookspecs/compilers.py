"""Compilers: turn a hot template into something faster, in the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import attrs
import torch

from djinn_core.hookspecs import hookspec

Replay = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@attrs.frozen
class CompilerContext:
    """A template that runs often.

    Attributes:
        graph_module: the template as a `torch.fx.GraphModule`, its scalars fixed to the present ones.
        inputs: example inputs.
        device: the device that it runs on.
        mutates: whether it writes into its inputs.
    """

    graph_module: torch.fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    device: torch.device
    mutates: bool


@runtime_checkable
class Compiler(Protocol):
    """Compiles templates. `name` is unique among compilers."""

    name: str

    def compile(self, context: CompilerContext) -> Replay | None:
        """A faster replay with the same results, or None where there is none."""


@hookspec
def djinn_register_compilers() -> Iterable[Compiler]:
    """Return the compilers that this plugin offers.

    Called once in each executor process. The setting `compilers` names those that are used, none by default. One that
    raises is not asked again for that template, and the executor goes on without it. Since API version 1.
    """
    raise NotImplementedError
