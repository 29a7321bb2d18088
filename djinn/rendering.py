"""For renderers, and commands that show programs: what is known of each part, the decisions of the stages, quantities as text."""

from __future__ import annotations

from djinn_core.ir.result import shown_until
from djinn_core.planning.explain.described import counted, describe, profile_facts
from djinn_core.planning.explain.outline import Part, by_call, by_name, outline
from djinn_core.planning.explain.rendering import render, renderer_for, renderer_of
from djinn_core.planning.explain.survey import Facts, MatchSummary, Survey, some
from djinn_core.planning.explain.text import explain, listed
from djinn_core.planning.explain.units import duration, share, size, work
from djinn_core.system.printable import size_text as binary_size

__all__ = [
    "Facts",
    "MatchSummary",
    "Part",
    "Survey",
    "binary_size",
    "by_call",
    "by_name",
    "counted",
    "describe",
    "duration",
    "explain",
    "listed",
    "outline",
    "profile_facts",
    "render",
    "renderer_for",
    "renderer_of",
    "share",
    "shown_until",
    "size",
    "some",
    "work",
]
