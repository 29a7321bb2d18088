"""Conformance suite for compilers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add

import pytest
import torch
from torch import fx

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.ir.values import meta_of
from djinn_server.hookspecs.compilers import Compiler, CompilerContext, Replay

aten = torch.ops.aten
Inputs = tuple[torch.Tensor, ...]


class CompilerConformance(Ending):
    """Tests that every compiler must pass.

    Subclass this class and define the fixture `compiler`. If the compiler needs another device than the CPU, override
    `torch_device`.
    """

    limit_seconds = 900.0

    @pytest.fixture
    def compiler(self) -> Compiler:
        """Return the compiler under test."""
        return missing(self, "compiler", "your compiler")  # type: ignore[return-value]

    @pytest.fixture
    def torch_device(self) -> torch.device:
        """Return the device on which compiled templates run."""
        return torch.device("cpu")

    def test_compiler_has_every_member(self, compiler: Compiler) -> None:
        """The compiler has all attributes and methods of `Compiler`."""
        require_protocol(compiler, "compilers")

    def test_compiled_results_match(self, compiler: Compiler, torch_device: torch.device) -> None:
        """Compiled code gives the results of the ops in each run and for other inputs.

        Earlier results do not change.
        """
        graph = fx.Graph()
        x, w = graph.placeholder("x"), graph.placeholder("w")
        product = graph.call_function(aten.mm.default, (x, w))
        normed = graph.call_function(aten.mul.Tensor, (product, graph.call_function(aten.sigmoid.default, (product,))))
        graph.output((normed, product))
        replay = _compiled(compiler, graph, _inputs(torch_device))
        runs = [_inputs(torch_device) for _ in range(6)]
        replayed = [tuple(replay(inputs)) for inputs in runs]
        for inputs, results in zip(runs, replayed, strict=True):
            expected = torch.mm(*inputs)
            torch.testing.assert_close(results, (expected * expected.sigmoid(), expected))

    def test_in_place_writes_reach_the_input(self, compiler: Compiler, torch_device: torch.device) -> None:
        """A compiled template that adds to its first input in place changes this input once per run."""
        graph = fx.Graph()
        x, w = graph.placeholder("x"), graph.placeholder("w")
        graph.call_function(aten.add_.Tensor, (x, w))
        graph.output((graph.call_function(aten.mul.Tensor, (x, 2.0)),))
        total, step = _inputs(torch_device)[1], torch.ones(4, 4, device=torch_device)
        replay = _compiled(compiler, graph, (total.clone(), step), writes=(0,))
        for operand in (total.clone(), total.clone()):
            for _ in range(6):
                (doubled,) = replay((operand, step))
            torch.testing.assert_close(operand, total + 6)
            torch.testing.assert_close(doubled, 2 * operand)

    def test_writes_through_views_reach_the_input(self, compiler: Compiler, torch_device: torch.device) -> None:
        """A compiled template that overwrites a row of its input leaves the other rows unchanged."""
        graph = fx.Graph()
        x, w = graph.placeholder("x"), graph.placeholder("w")
        graph.call_function(aten.copy_.default, (graph.call_function(aten.select.int, (x, 0, 1)), w))
        graph.output((graph.call_function(aten.add.Tensor, (x, 1.0)),))
        table, row = _inputs(torch_device)[1], torch.zeros(4, device=torch_device)
        replay = _compiled(compiler, graph, (table.clone(), row), writes=(0,))
        for value in range(5):
            operand = table.clone()
            (second_result,) = replay((operand, row + value))
            expected = table.clone()
            expected[1] = value
            torch.testing.assert_close((operand, second_result), (expected, expected + 1))

    def test_growing_sizes_are_supported(self, compiler: Compiler, torch_device: torch.device) -> None:
        """A compiled template works if its cache grows by a row per run.

        Numeric arguments may depend on the number of rows.
        """
        graph = fx.Graph()
        cache, row = graph.placeholder("cache"), graph.placeholder("row")
        length = graph.call_function(aten.sym_size.int, (cache, 0))
        longer = graph.call_function(aten.cat.default, ([cache, row], 0))
        place = graph.call_function(aten.arange.start, (length, graph.call_function(add, (length, 1))))
        last = graph.call_function(aten.select.int, (longer, 0, length))
        graph.output((longer, place, graph.call_function(aten.mul.Tensor, (last, 3.0))))
        operand = torch.rand(5, 4, device=torch_device)
        row_ = torch.rand(1, 4, device=torch_device)
        replay = _compiled(compiler, graph, (operand, row_), grows={0: (0,)})
        for _ in range(6):
            expected = (torch.cat([operand, row_]), torch.tensor([len(operand)]), row_[0] * 3)
            results = tuple(replay((operand, row_)))
            torch.testing.assert_close(results, expected, check_device=False)
            operand = results[0]

    def test_read_only_inputs_stay_unchanged(self, compiler: Compiler, torch_device: torch.device) -> None:
        """Inputs that a compiled template only reads stay unchanged."""
        graph = fx.Graph()
        x, w = graph.placeholder("x"), graph.placeholder("w")
        changed = graph.call_function(aten.add_.Tensor, (graph.call_function(aten.mul.Tensor, (x, 2.0)), 1.0))
        graph.output((graph.call_function(aten.mm.default, (changed, w)),))
        replay = _compiled(compiler, graph, _inputs(torch_device))
        inputs = _inputs(torch_device)
        before = [tensor.clone() for tensor in inputs]
        for _ in range(4):
            replay(inputs)
        torch.testing.assert_close(list(inputs), before)


def _inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(3, 4, device=device), torch.rand(4, 4, device=device)


def _compiled(
    compiler: Compiler,
    graph: fx.Graph,
    inputs: Inputs,
    writes: tuple[int, ...] = (),
    grows: Mapping[int, Sequence[int]] | None = None,
) -> Replay:
    metas = tuple([meta_of(tensor) for tensor in inputs])
    sizes = {index: tuple(dimensions) for index, dimensions in (grows or {}).items()}
    context = CompilerContext(fx.GraphModule({}, graph), metas, inputs[0].device, writes, sizes)
    replay = compiler.compile(context)
    if replay is None:
        pytest.skip("the compiler does not compile this template")
    return replay
