"""The renderers. Their dependencies are imported on use: networkx takes a quarter of a second, and few programs draw."""

from __future__ import annotations

from djinn.hooks import Renderer
from djinn.planning import PipelineResult


class SvgRenderer(Renderer):
    """Renders a static picture."""

    name = "svg"
    suffixes = (".svg",)
    media_type = "image/svg+xml"

    def render(self, result: PipelineResult) -> str:
        """Return an SVG in which the slowest parts are open."""
        from djinn_observability.html.svg import svg

        return svg(result)


class HtmlRenderer(Renderer):
    """Renders a page in which boxes open and close by a click."""

    name = "html"
    suffixes = (".html", ".htm")
    media_type = "text/html"

    def render(self, result: PipelineResult) -> str:
        """Return one HTML file, with the script that draws it."""
        from djinn_observability.html.page import page

        return page(result)
