"""Views of the time of a program: `djinn.profile()` and `djinn.explain_waits()`.

- `profiling`: the block and its `Timeline`. `assembling`: from raw records to events; `submissions`, `threads`: its parts. `events`: what there is.
- `report`: the time by cause, module and line, with advice. `trace_file`: a file for Perfetto.
- `waits`: round trips that the program waits for.
"""
