"""Renderers `svg` and `html`: plans as pictures, as pages, and as tables in notebooks."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Renderer, hookimpl
from djinn_observability.html.renderers import HtmlRenderer, SvgRenderer

__all__ = ["HtmlRenderer", "SvgRenderer", "djinn_api_version", "djinn_register_renderers"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_renderers() -> Iterable[Renderer]:
    """Register the renderers `html` and `svg`."""
    return [HtmlRenderer(), SvgRenderer()]
