"""Recognises recurrences: LSTM, GRU and plain cells, state-space layers, linear attention, as loops, scans or one op."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Pattern, hookimpl
from djinn_patterns.recurrent.pattern import Recurrent

djinn_api_version = "2.0"


@hookimpl
def djinn_register_patterns() -> Iterable[Pattern]:
    """The pattern `recurrent`."""
    return [Recurrent()]
