"""Notebook representations (`_repr_html_`, `_repr_svg_`) of values; the package `showing` registers their renderers here."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from djinn_core.ir.short_repr import ShortRepr


@singledispatch
def html_of(shown: Any) -> str | None:
    """A value as HTML; None where no renderer is registered, and the notebook shows its text."""
    del shown
    return None


@singledispatch
def svg_of(shown: Any) -> str | None:
    """A value as an SVG; None where no renderer is registered."""
    del shown
    return None


class ShownInNotebooks(ShortRepr):
    """Mixin for values that notebooks show as HTML."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return html_of(self)


class DrawnInNotebooks(ShortRepr):
    """Mixin for values that notebooks show as an SVG drawing."""

    __slots__ = ()

    def _repr_svg_(self) -> str | None:
        return svg_of(self)
