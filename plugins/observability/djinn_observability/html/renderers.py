"""The renderers. They import their dependencies on use, because networkx takes a quarter of a second."""

from __future__ import annotations

from djinn.hooks import Renderer
from djinn.planning import PipelineResult


class SvgRenderer(Renderer):
    """Render a program as a static picture."""

    name = "svg"
    suffixes = (".svg",)
    media_type = "image/svg+xml"

    def render(self, result: PipelineResult) -> str:
        """Return an SVG in which the slowest parts are open."""
        from djinn_observability.html.svg import svg

        return svg(result)


class HtmlRenderer(Renderer):
    """Render a program as a page in which a click opens or closes a box."""

    name = "html"
    suffixes = (".html", ".htm")
    media_type = "text/html"

    def render(self, result: PipelineResult) -> str:
        """Return one HTML file, with the script that draws it."""
        from djinn_observability.html.page import page

        return page(result)
