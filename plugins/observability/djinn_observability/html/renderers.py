"""The renderers. What they need is imported when they are asked: networkx takes a quarter of a second, and few programs draw."""

from __future__ import annotations

from djinn.hooks import Renderer
from djinn.planning import PipelineResult


class SvgRenderer(Renderer):
    """A picture that stands still."""

    name = "svg"
    suffixes = (".svg",)
    media_type = "image/svg+xml"

    def render(self, result: PipelineResult) -> str:
        """The parts that take most of the time are open."""
        from djinn_observability.html.svg import svg

        return svg(result)


class HtmlRenderer(Renderer):
    """A page in which boxes open and close by a click."""

    name = "html"
    suffixes = (".html", ".htm")
    media_type = "text/html"

    def render(self, result: PipelineResult) -> str:
        """One file, with the script that draws it."""
        from djinn_observability.html.page import page

        return page(result)
