"""Commands of `djinn`: `connect`, `demo`, `planning`, `run` and `servers`; `notebook`: those of notebooks. `script` runs a user's script.

It is imported for `djinn --help`, so it imports nothing.
"""
