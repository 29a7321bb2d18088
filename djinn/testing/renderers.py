"""Conformance suite for renderers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from djinn.testing.contexts import costs, plan, profile, spread, topology
from djinn.testing.suite import OnGraphs, missing, require_protocol
from djinn_client.hookspecs.renderers import Renderer
from djinn_core.ir.graph import Graph
from djinn_core.ir.result import PipelineResult


class RendererConformance(OnGraphs):
    """Tests that every renderer must pass. Subclass this class and define the fixture `renderer`."""

    @pytest.fixture
    def renderer(self) -> Renderer:
        """Return the renderer under test."""
        return missing(self, "renderer", "your renderer")  # type: ignore[return-value]

    def test_renderer_has_every_member(self, renderer: Renderer) -> None:
        """The renderer has all attributes and methods of `Renderer`.

        No other renderer has its name, endings or media type.
        """
        require_protocol(renderer, "renderers")
        assert renderer.name not in {"text", "json"}, f"the name {renderer.name!r} belongs to a built-in format"
        assert re.fullmatch(r"[\w.+-]+/[\w.+-]+", renderer.media_type), f"{renderer.media_type!r} is no media type"
        for suffix in renderer.suffixes:
            assert re.fullmatch(r"\.[a-z0-9_]+", suffix), (
                f"the suffix {suffix!r} must be a dot, then small letters, digits or underscores"
            )

    def test_graph_alone_is_rendered(self, renderer: Renderer, graphs: Mapping[str, Graph]) -> None:
        """`render` accepts a result in which all stages after the graph are None."""
        for graph in graphs.values():
            rendered = renderer.render(PipelineResult(graph, topology()))
            assert isinstance(rendered, (str, bytes)), f"`render` returned {rendered!r}, but must return text or bytes"
            assert rendered, "`render` returned an empty file"

    def test_all_stages_are_rendered(self, renderer: Renderer, graphs: Mapping[str, Graph]) -> None:
        """`render` accepts a result of all stages, and returns equal output each time."""
        for graph in graphs.values():
            result = _complete(graph)
            assert renderer.render(result) == renderer.render(result), (
                "two calls of `render` returned different output for one result"
            )


def _complete(graph: Graph) -> PipelineResult:
    devices = topology(2)
    return PipelineResult(
        graph,
        devices,
        profile=profile(graph),
        costs=costs(graph, devices),
        plan=plan(graph),
        placement=spread(graph, devices),
    )
