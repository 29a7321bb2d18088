"""Notebook representations (`_repr_html_`, `_repr_svg_`) of values: what the renderers of plugins make of them."""

from __future__ import annotations

from functools import singledispatch

from djinn_core.ir.short_repr import ShortRepr


@singledispatch
def display(value: object, media_type: str) -> str | None:
    """A value in a format; None if the notebook shows its text. The client, which knows the plugins, registers how."""
    del value, media_type
    return None


class ShownInNotebooks(ShortRepr):
    """Mixin for values that notebooks show as HTML or as a drawing, where a renderer has a view of them."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return display(self, "text/html")

    def _repr_svg_(self) -> str | None:
        return display(self, "image/svg+xml")
