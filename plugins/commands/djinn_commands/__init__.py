"""Commands of `djinn`: `connect`, `demo` and `planning`.

It is imported for `djinn --help`, so it imports nothing.
"""
