"""The renderers. What they need is imported when they are asked: networkx takes a quarter of a second, and few programs draw."""

from __future__ import annotations

from djinn.hooks import Renderer
from djinn.planning import Graph, NetworkTopology, PipelineResult

_LARGEST = 20_000  # ops of a graph that is drawn unasked
_NOWHERE = NetworkTopology(())


class SvgRenderer(Renderer):
    """A picture that stands still."""

    name = "svg"
    suffixes = (".svg",)
    media_type = "image/svg+xml"

    def render(self, result: PipelineResult) -> str:
        """The parts that take most of the time are open."""
        from djinn_observability.html.svg import svg

        return svg(result)

    def display(self, value: object) -> str | None:
        """Graphs, unless they are huge."""
        if not isinstance(value, Graph) or not 0 < len(value.nodes) <= _LARGEST:
            return None
        return self.render(PipelineResult(value, _NOWHERE))


class HtmlRenderer(Renderer):
    """A page in which boxes open and close by a click."""

    name = "html"
    suffixes = (".html", ".htm")
    media_type = "text/html"

    def render(self, result: PipelineResult) -> str:
        """One file, with the script that draws it."""
        from djinn_observability.html.page import page

        return page(result)

    def display(self, value: object) -> str | None:
        """Tables of the results of stages."""
        from djinn_observability.html.tables import table_of

        return table_of(value)
