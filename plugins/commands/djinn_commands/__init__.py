"""Commands of `djinn`: `connect`, `demo`, `planning`, `run` and `servers`; `notebook`: notebook magics.

`script` runs a user's script.

This module is imported for `djinn --help`, so it imports nothing.
"""
