"""Helpers for renderers: what is known of each part of a program, the decisions of the stages, and quantities as text."""

from __future__ import annotations

from djinn_core.showing.described import counted, describe, profile_facts
from djinn_core.showing.outline import Part, by_call, by_name, outline
from djinn_core.showing.survey import Facts, MatchSummary, Survey, some
from djinn_core.showing.text import explain, listed
from djinn_core.showing.units import duration, share, size, work

__all__ = [
    "Facts",
    "MatchSummary",
    "Part",
    "Survey",
    "by_call",
    "by_name",
    "counted",
    "describe",
    "duration",
    "explain",
    "listed",
    "outline",
    "profile_facts",
    "share",
    "size",
    "some",
    "work",
]
