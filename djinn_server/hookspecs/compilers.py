"""`djinn_register_compilers`: compile templates (recorded programs) that run often, in the executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import torch

from djinn_core.hookspecs import hookspec
from djinn_core.ir.values import TensorMeta

Replay = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@attrs.frozen
class CompilerContext:
    """A template (recorded program) that runs often, as input of a compiler.

    Attributes:
        graph_module: the ops as a `torch.fx.GraphModule` over tensors. Numbers are constants, or computed from a size of an input
            (`aten.sym_size.int` and integer arithmetic). No result shares memory with another result or an input.
        metas: metadata of the inputs in the last run.
        device: the device that runs the template.
        writes: positions of the inputs that the template writes into.
        grows: by input, the dimensions whose sizes depend on one number that changes from run to run. The dependence is
            linear. Empty if every run has the same shapes.
        threads: torch threads of the executor.
    """

    graph_module: torch.fx.GraphModule
    metas: tuple[TensorMeta, ...]
    device: torch.device
    writes: tuple[int, ...] = ()
    grows: Mapping[int, tuple[int, ...]] = attrs.field(factory=dict)
    threads: int = 1

    @cached_property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Example inputs with the metadata of `metas`, filled with zeros. They are created at the first access."""
        return tuple(
            torch.zeros(meta.extent, dtype=meta.dtype, device=self.device).as_strided(meta.shape, meta.stride)
            for meta in (attrs.evolve(m, offset=0) for m in self.metas)
        )


class Compiler(ABC):
    """Compile templates (recorded programs) that run often, in an executor process.

    The setting `compilers` names the compilers in use, in the order in which they are tried. Before the executor uses
    compiled code, it compares the results with those of the ops and times both. If a method raises, the executor does
    not use this compiler for the template.

    Attributes:
        name: unique among compilers.
    """

    name: str

    @abstractmethod
    def compile(self, context: CompilerContext) -> Replay | None:
        """Return a faster function with the same results, or None if there is none.

        Called on a background thread, one template at a time, while sessions run. Run slow work in a separate process
        (`djinn.hooks.CompileProcess`). Threads of sessions call the returned function, one at a time. Its results must
        not share memory with each other, with inputs or with earlier results.
        """

    def prepare(self) -> None:  # noqa: B027 - most compilers need no preparation
        """Load slow dependencies, such as a toolchain, before the first template is compiled.

        Called on the background thread when the executor starts, and again when it receives its first template. If this
        method raises, `compile` is still called.
        """


@hookspec
def djinn_register_compilers(settings: Any) -> Iterable[Compiler]:
    """Return the compilers that this plugin offers.

    Called once in each executor process. The setting `compilers` lists the compilers in use, in the order in which they are
    tried; none by default. The executor compares and times each compiled replay against the template before it uses it. After an
    exception the executor does not use the compiler for that template.
    """
    del settings
    raise NotImplementedError
