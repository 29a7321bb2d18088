"""How values show themselves in notebooks. What they look like is none of their business: `showing` registers it here."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from djinn_core.ir.short_repr import ShortRepr


@singledispatch
def html_of(shown: Any) -> str | None:
    """A value as HTML; None where nobody registered how, and the notebook shows its text."""
    del shown
    return None


@singledispatch
def svg_of(shown: Any) -> str | None:
    """A value as an SVG; None where nobody registered how."""
    del shown
    return None


class ShownInNotebooks(ShortRepr):
    """What notebooks ask a value for."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return html_of(self)


class DrawnInNotebooks(ShortRepr):
    """What notebooks ask a value for that is drawn."""

    __slots__ = ()

    def _repr_svg_(self) -> str | None:
        return svg_of(self)
