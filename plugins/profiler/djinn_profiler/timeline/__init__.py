"""Views of the time of a program: `djinn.profile()` and `djinn.explain_waits()`.

- `profiling`: the block and its `Timeline`. `assembling`: from raw records to events; `submissions`, `threads`: its parts. `events`: what there is.
- `report`: the time by cause, module and line, with advice. `trace_file`: a file for Perfetto.
- `waits`: round trips that the program waits for.
"""

from __future__ import annotations

from djinn.hooks import ApiName, hookimpl

djinn_api_version = "2.0"


@hookimpl
def djinn_register_api_names() -> list[ApiName]:
    """The names of `djinn` that this package brings."""
    return [
        ApiName("Timeline", "djinn_profiler.timeline.profiling"),
        ApiName("TimelineEvent", "djinn_profiler.timeline.events"),
        ApiName("WaitReport", "djinn_profiler.timeline.waits"),
        ApiName("explain_waits", "djinn_profiler.timeline.waits"),
        ApiName("profile", "djinn_profiler.timeline.profiling"),
    ]
