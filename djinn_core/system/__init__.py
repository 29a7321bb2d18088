"""Calls of the operating system, with an answer for each platform: nothing else in Djinn makes them by itself.

Where a platform has no such thing, a function says so by its result or by `OSError`, and its caller logs what is missing.
"""
