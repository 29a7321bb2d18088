"""Time profiling of programs: `djinn.profile()` and `djinn.explain_waits()`.

- `profiling`: the block and its `Timeline`. `record_timeline`, `recording`: recording. `recorded`: the raw records.
  `clocks`: clocks of executors.
- `assembling`: turns raw records into events; `submissions`, `threads`, `module_changes`: its parts. `events`: the
  event types.
- `report`: the time by cause, module and line, with advice. `trace_file`: a file for Perfetto.
- `waits`: round trips that the program waits for. `user_places`: the lines that wait, and advice.
"""
