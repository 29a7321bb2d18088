"""The outline of a program: modules as a tree, equal layers folded, whatever modules are called."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import Layer, Tower
from torch import nn

import djinn
from djinn.planning import fx_graph
from djinn_core.ir.module_names import ModuleNames
from djinn_profiler.explain.outline import Part, by_call, by_name, fold, outline


def capture_graph(model: nn.Module, *inputs: torch.Tensor) -> djinn.planning.Graph:
    with djinn.capture() as program, torch.no_grad():
        model(*inputs)
    return program.graph


def tower(layers: list[nn.Module]) -> djinn.planning.Graph:
    with torch.device("meta"):
        return capture_graph(Tower(layers), torch.zeros(3, 4))


def names(parts: tuple[Part, ...]) -> list[tuple[str, int]]:
    return [(part.name, part.count) for part in parts]


def test_equal_layers_are_folded() -> None:
    with torch.device("meta"):
        graph = tower([Layer(8) for _ in range(32)])
    whole = outline(graph)
    assert (whole.name, whole.kind) == ("Tower", "Tower")
    assert names(whole.parts) == [("first", 1), ("layers.0-31", 32), ("last", 1)]
    layers = whole.parts[1]
    assert layers.kind == "Layer"
    assert names(layers.parts) == [("linear", 1), ("function", 1), ("", 1)]
    assert sorted(n for part in layers.parts for n in part.nodes) == list(layers.nodes)
    assert len(layers.nodes) == 32 * len(layers.sample)
    assert len(outline(graph, unfold=True).parts) == 34


def test_alternating_layers_are_folded() -> None:
    with torch.device("meta"):
        one = tower([Layer(8), Layer(8), Layer(8, nn.Tanh()), Layer(8)])
        turns = tower([Layer(8, nn.Tanh() if i % 2 else nn.ReLU()) for i in range(8)])
    assert names(outline(one).parts)[1:-1] == [("layers.0-1", 2), ("layers.2", 1), ("layers.3", 1)]
    (folded,) = outline(turns).parts[1:-1]
    assert (folded.name, folded.count) == ("layers.0-7", 4)
    assert [part.name for part in folded.parts] == ["layers.0,2-6", "layers.1,3-7"]


def test_outline_shows_repeated_calls_of_module() -> None:
    class CalledTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x).relu())

    with torch.device("meta"):
        graph = capture_graph(CalledTwice(), torch.zeros(2, 4))
    (inner, own) = outline(graph, grouping=by_name).parts
    assert (inner.name, inner.calls, own.name) == ("inner", 2, "")
    assert names(outline(graph, grouping=by_call).parts) == [("inner", 1), ("", 1), ("inner", 1)]


def test_outline_separates_successive_models() -> None:
    with torch.device("meta"):
        first, second, x = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4)
    with djinn.capture() as program, torch.no_grad():
        second(first(x).relu())
    assert names(outline(program.graph).parts) == [("Linear", 1), ("", 1), ("Sequential", 1)]


def test_exported_graph_has_outline() -> None:
    exported = torch.export.export(Tower([Layer(8) for _ in range(3)]), (torch.zeros(3, 4),))
    whole = outline(fx_graph(exported))
    assert ("layers.0-2", 3) in names(whole.parts)


@given(st.lists(st.integers(0, 2), max_size=40), st.booleans())
def test_outline_folding_keeps_order(kinds: list[int], numbered: bool) -> None:
    parts = list(enumerate(kinds))
    folded = fold(parts, lambda p: p[1], lambda p: f"layer{p[0]}" if numbered else "layer")
    assert [part for f in folded for r in f.rounds for part in r] == parts
    for f in folded:
        assert len({tuple(kind for _, kind in r) for r in f.rounds}) == 1


@pytest.mark.parametrize("path", ["", "a.b", "layers.3.x"])
def test_outline_accepts_paths_of_uncalled_modules(path: str) -> None:
    graph = capture_graph(nn.Linear(2, 2), torch.zeros(1, 2))
    named = type(graph)(graph.program, dict.fromkeys(range(len(graph.nodes)), path))
    assert isinstance(named.module_names, ModuleNames)
    assert set(outline(named).nodes) == set(range(len(graph.nodes)))
