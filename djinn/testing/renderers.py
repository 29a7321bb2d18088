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
    """Conformance suite. Subclass it and define the fixture `renderer`."""

    @pytest.fixture
    def renderer(self) -> Renderer:
        """Return the renderer under test."""
        return missing(self, "renderer", "your renderer")  # type: ignore[return-value]

    def test_it_is_a_renderer(self, renderer: Renderer) -> None:
        """The renderer has every member. Its name, endings and media type are unique."""
        require_protocol(renderer, "renderers")
        assert renderer.name not in {"text", "json"}, f"the format {renderer.name!r} is Djinn's own"
        assert re.fullmatch(r"[\w.+-]+/[\w.+-]+", renderer.media_type), f"{renderer.media_type!r} is no media type"
        for suffix in renderer.suffixes:
            assert re.fullmatch(r"\.[a-z0-9_]+", suffix), (
                f"{suffix!r} is no ending of a file: a dot, small letters, digits, underscores"
            )

    def test_it_renders_a_graph_without_further_stages(self, renderer: Renderer, graphs: Mapping[str, Graph]) -> None:
        """A result is rendered even if all its stages after the graph are None."""
        for graph in graphs.values():
            rendered = renderer.render(PipelineResult(graph, topology()))
            assert isinstance(rendered, (str, bytes)), f"`render` returned {rendered!r}, but must return text or bytes"
            assert rendered, "`render` returned nothing"

    def test_it_renders_the_result_of_all_stages(self, renderer: Renderer, graphs: Mapping[str, Graph]) -> None:
        """A result of all stages is rendered, equally each time."""
        for graph in graphs.values():
            result = _complete(graph)
            assert renderer.render(result) == renderer.render(result), "it renders one result in two ways"


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
