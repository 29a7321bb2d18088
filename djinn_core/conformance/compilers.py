"""The suite for compilers."""

from __future__ import annotations

import pytest
import torch

from djinn_core.conformance.suite import missing, require_protocol
from djinn_core.hookspecs.compilers import Compiler, CompilerContext


class CompilerConformance:
    """Subclass it and give the fixture `compiler`; override `torch_device` where it needs another than the CPU."""

    @pytest.fixture
    def compiler(self) -> Compiler:
        """The compiler."""
        return missing(self, "compiler", "your compiler")  # type: ignore[return-value]

    @pytest.fixture
    def torch_device(self) -> torch.device:
        """Where the templates run."""
        return torch.device("cpu")

    def test_it_is_a_compiler(self, compiler: Compiler) -> None:
        """It has every member."""
        require_protocol(compiler, "compilers")

    def test_what_it_compiles_gives_the_same(self, compiler: Compiler, torch_device: torch.device) -> None:
        """Also for inputs other than those of the example, and when it runs again."""
        graph = torch.fx.Graph()
        x, w = graph.placeholder("x"), graph.placeholder("w")
        product = graph.call_function(torch.ops.aten.mm.default, (x, w))
        graph.output((graph.call_function(torch.ops.aten.relu.default, (product,)), product))
        example = _inputs(torch_device)
        replay = compiler.compile(_context(graph, example, torch_device, mutates=False))
        if replay is None:
            pytest.skip("it has nothing better for this template")
        for inputs in (example, _inputs(torch_device), _inputs(torch_device)):
            expected = torch.mm(*inputs)
            torch.testing.assert_close(tuple(replay(inputs)), (torch.relu(expected), expected))

    def test_it_respects_writes(self, compiler: Compiler, torch_device: torch.device) -> None:
        """A template that adds to its first input in place: the input changes once a run."""
        graph = torch.fx.Graph()
        x, w = graph.placeholder("x"), graph.placeholder("w")
        graph.output((graph.call_function(torch.ops.aten.add_.Tensor, (x, w)),))
        total, step = _inputs(torch_device)[1], torch.ones(4, 4, device=torch_device)
        example = (total.clone(), step)
        replay = compiler.compile(_context(graph, example, torch_device, mutates=True))
        if replay is None:
            pytest.skip("it has nothing better for this template")
        held = total.clone()
        for _ in range(3):
            replay((held, step))
        torch.testing.assert_close(held, total + 3)


def _inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(3, 4, device=device), torch.rand(4, 4, device=device)


def _context(
    graph: torch.fx.Graph, inputs: tuple[torch.Tensor, ...], device: torch.device, mutates: bool
) -> CompilerContext:
    return CompilerContext(torch.fx.GraphModule({}, graph), inputs, device, mutates)
